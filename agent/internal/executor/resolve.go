package executor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// resolve carries out a person's signed word about a held task. What becomes of
// that task and the end of this one are one transaction.
func (t *task) resolve(ctx context.Context) error {
	spec, ok := t.spec.(*taskv1.ResolveSpec)
	if !ok {
		return t.finish(ctx, end{state: refused, reason: reasonPrecondition, message: "its spec is no ResolveSpec"})
	}
	if err := t.e.newTask(spec.GetTaskId()).load(); errors.Is(err, state.ErrNotFound) {
		return t.resolveLost(ctx, spec)
	}
	var names []string
	for _, a := range t.rec.GetAuthorizedBy() {
		names = append(names, a.GetName())
	}
	s := settlement{taskID: spec.GetTaskId(), leafHash: spec.GetLeafHash(), as: spec.GetAs(), by: strings.Join(names, ", "), reason: t.leaf.GetReason()}
	_, err := t.e.settle(ctx, s, func(tx *state.Tx, as taskv1.TaskState) error {
		result, err := anypb.New(&taskv1.ResolveResult{State: as})
		if err != nil {
			return fmt.Errorf("pack result of task %s: %w", t.id, err)
		}
		rec, err := tx.Task(t.id)
		if err != nil {
			return err
		}
		if err := t.end(tx, rec, end{state: succeeded, result: result}); err != nil {
			return err
		}
		return tx.PutTask(rec)
	})
	var refusal *gate.Refusal
	if errors.As(err, &refusal) {
		return t.finish(ctx, end{state: refused, reason: refusal.Reason, message: refusal.Message})
	}
	return err
}

// resolveLost settles a task that this node does not know, since it lost the
// journal that held it: the server still does. Nothing can be checked or ended
// here, so that only giving it up is true.
func (t *task) resolveLost(ctx context.Context, spec *taskv1.ResolveSpec) error {
	if spec.GetAs() != taskv1.ResolveAs_RESOLVE_AS_ABANDON {
		return t.finish(ctx, end{state: refused, reason: reasonPrecondition, message: fmt.Sprintf(
			"task %s is not in this node's journal, so that nothing can be checked: settle it as abandon, and sign it again", spec.GetTaskId())})
	}
	result, err := anypb.New(&taskv1.ResolveResult{State: abandoned})
	if err != nil {
		return fmt.Errorf("pack result of task %s: %w", t.id, err)
	}
	return t.finish(ctx, end{state: succeeded, result: result})
}

// Resolve settles a held task by the word of root on the node. The error is a
// [*gate.Refusal] when the task cannot be settled like that.
func (e *Executor) Resolve(ctx context.Context, req *agentv1.ResolveTaskRequest) (taskv1.TaskState, error) {
	s := settlement{taskID: req.GetTaskId(), as: req.GetAs(), by: "root on the node", reason: req.GetReason()}
	return e.settle(ctx, s, func(*state.Tx, taskv1.TaskState) error { return nil })
}

// settlement is a person's word about a held task.
type settlement struct {
	taskID   string
	leafHash []byte // nil: not given
	as       taskv1.ResolveAs
	by       string
	reason   string
}

// settle ends a held task, with what also writes in the same transaction. What
// cannot be settled is a [*gate.Refusal].
func (e *Executor) settle(ctx context.Context, s settlement, also func(*state.Tx, taskv1.TaskState) error) (taskv1.TaskState, error) {
	t := e.newTask(s.taskID)
	err := t.load()
	if errors.Is(err, state.ErrNotFound) {
		return 0, precondition("task %s is not on this node", s.taskID)
	}
	if err != nil {
		return 0, err
	}
	if refusal := s.check(t.rec); refusal != nil {
		return 0, refusal
	}
	if s.as == taskv1.ResolveAs_RESOLVE_AS_UNDO {
		return e.undoHeld(ctx, t, s, also)
	}
	to, err := e.settled(ctx, t, s)
	if err != nil {
		return 0, err
	}
	crash.Point("executor.resolve.before")
	err = t.commit(func(tx *state.Tx, rec *agentv1.TaskRecord) error {
		if refusal := s.check(rec); refusal != nil {
			return refusal
		}
		if err := t.end(tx, rec, to); err != nil {
			return err
		}
		return also(tx, to.state)
	})
	if err != nil {
		return 0, err
	}
	crash.Point("executor.resolve.committed")
	e.locks.release(e.locks.of(t.id))
	t.log.WarnContext(ctx, "held task was settled", "state", to.state.String(), "by", s.by, "why", s.reason)
	return to.state, nil
}

func (s settlement) check(rec *agentv1.TaskRecord) *gate.Refusal {
	switch {
	case s.leafHash != nil && !sameHash(s.leafHash, rec.GetLeafHash()):
		return precondition("task %s on this node has another leaf than the one that is meant", s.taskID)
	case rec.GetState() != taskv1.TaskState_TASK_STATE_HELD:
		return precondition("task %s is %s, and only a held task can be settled", s.taskID, word(rec.GetState()))
	}
	return nil
}

// settled says how the held task ends. Of a kind with a goal the node must be
// there before it counts as succeeded.
func (e *Executor) settled(ctx context.Context, t *task, s settlement) (end, error) {
	message := t.rec.GetMessage()
	if s.reason != "" {
		message = s.reason
	}
	switch s.as {
	case taskv1.ResolveAs_RESOLVE_AS_ABANDON:
		if err := t.open(); err != nil {
			t.log.WarnContext(ctx, "abandoned task cannot be read", "err", err)
		}
		return end{state: abandoned, undo: t.leftAs(), reason: t.rec.GetReason(), message: message, assertedBy: s.by}, nil
	case taskv1.ResolveAs_RESOLVE_AS_ACCEPT:
	default:
		return end{}, precondition("task %s: a held task can be settled as undo, accept or abandon", s.taskID)
	}
	if err := t.open(); err != nil {
		return end{}, precondition("task %s: %v", s.taskID, err)
	}
	to := end{state: succeeded, message: s.reason, assertedBy: s.by}
	if t.kind.Class == tasks.Action {
		return to, nil
	}
	limited, done := context.WithTimeout(ctx, lastCheck)
	defer done()
	err := t.check(limited, func() error { return t.kind.Verify(limited, e.cfg.Hosts.Prober(), t.spec) })
	if err == nil {
		to.result, err = t.result(limited)
	}
	if ctx.Err() != nil {
		return end{}, ctx.Err()
	}
	if err != nil {
		return end{}, &gate.Refusal{Reason: reasonVerifyFailed, Message: fmt.Sprintf(
			"task %s cannot count as succeeded, the node is not as it should be: %v; put that right by hand, or abandon the task", s.taskID, err)}
	}
	return to, nil
}

// leftAs says what became of the steps of a task that is given up as it is.
func (t *task) leftAs() taskv1.UndoState {
	for _, sr := range t.steps {
		if undoable(sr.GetPhase()) {
			return taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE
		}
	}
	return t.undone()
}

func precondition(format string, args ...any) *gate.Refusal {
	return &gate.Refusal{Reason: reasonPrecondition, Message: fmt.Sprintf(format, args...)}
}

// word is a state as people read it.
func word(s taskv1.TaskState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "TASK_STATE_"))
}
