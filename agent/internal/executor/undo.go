package executor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// undoHeld turns a held task to undo by a person's word. The turn, and what also
// writes, are one transaction; the undo itself is carried on by the task's
// goroutine, over any crash, and ends the task as failed, or holds it again.
func (e *Executor) undoHeld(ctx context.Context, t *task, s settlement, also func(*state.Tx, taskv1.TaskState) error) (taskv1.TaskState, error) {
	if refusal := t.mayUndo(s); refusal != nil {
		return 0, refusal
	}
	grant := e.locks.of(t.id)
	if past, ok := e.locks.unstick(grant); !ok {
		return 0, precondition("task %s waits for nobody's word while task %s, which it does not block, has the node: settle it after that", s.taskID, past)
	}
	err := t.commit(func(tx *state.Tx, rec *agentv1.TaskRecord) error {
		if refusal := s.check(rec); refusal != nil {
			return refusal
		}
		rec.State, rec.Undoing = taskv1.TaskState_TASK_STATE_RUNNING, true
		rec.Message = fmt.Sprintf("undone by the word of %s%s; it was held: %s", s.by, because(s.reason), rec.GetMessage())
		if err := also(tx, rec.GetState()); err != nil {
			return err
		}
		if rec.GetEvents() > MaxEvents-3 {
			return nil // there must be room for the next hold and the end
		}
		return t.emit(tx, rec, &taskv1.Event{Payload: &taskv1.Event_Undoing{Undoing: &taskv1.TaskUndoing{
			TaskId: t.id, Reason: rec.GetReason(), Message: rec.GetMessage(),
		}}})
	})
	var refusal *gate.Refusal
	if errors.As(err, &refusal) {
		return 0, err // another's word was quicker: the task is not held any more, nor are its locks stuck
	}
	if err != nil {
		e.locks.stick(grant)
		return 0, err
	}
	t.log.WarnContext(ctx, "held task is undone", "by", s.by, "why", s.reason)
	next := e.newTask(t.id)
	next.grant = grant
	e.launch(next)
	return taskv1.TaskState_TASK_STATE_RUNNING, nil
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return " (" + reason + ")"
}

// mayUndo refuses the undo of a task in which nothing can be undone, or where
// something still goes on that would change the node again.
func (t *task) mayUndo(s settlement) *gate.Refusal {
	if err := t.open(); err != nil {
		return precondition("task %s: %v", s.taskID, err)
	}
	if t.e.hangs(t.id) {
		return precondition("task %s: a call to the node still hangs, and could change it after the undo: restart millwrightd or reboot the node first", s.taskID)
	}
	for i, sr := range t.steps {
		if p := t.plan.GetSteps()[i]; undoable(sr.GetPhase()) && p.GetUndoable() {
			return nil
		}
	}
	return precondition("task %s: none of its steps can be undone: settle it as accept or abandon", s.taskID)
}

// undoReport says what was undone and what was not, when not all was.
func (t *task) undoReport() string {
	var done, not []string
	for i, sr := range t.steps {
		name := fmt.Sprintf("step %d (%s)", i, t.plan.GetSteps()[i].GetTitle())
		switch sr.GetPhase() {
		case taskv1.StepPhase_STEP_PHASE_UNDONE:
			done = append(done, name)
		case taskv1.StepPhase_STEP_PHASE_NOT_UNDOABLE:
			if sr.GetOut() == nil {
				name += ", of which it is not known whether it happened"
			}
			not = append(not, name)
		default:
		}
	}
	if len(not) == 0 {
		return ""
	}
	if len(done) == 0 {
		done = []string{"nothing"}
	}
	return "; undone: " + strings.Join(done, ", ") + "; not undone: " + strings.Join(not, ", ")
}
