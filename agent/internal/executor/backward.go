package executor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

const undoTries = 3

// undoable reports whether a step in the phase may have changed the node.
func undoable(p taskv1.StepPhase) bool {
	switch p {
	case taskv1.StepPhase_STEP_PHASE_OBSERVED, taskv1.StepPhase_STEP_PHASE_APPLIED,
		taskv1.StepPhase_STEP_PHASE_VERIFIED, taskv1.StepPhase_STEP_PHASE_UNDOING:
		return true
	default:
		return false
	}
}

// turn makes durable that the task goes backward from here, and why.
func (t *task) turn(ctx context.Context, f *failure) error {
	if f.step >= 0 {
		t.steps[f.step].Error, t.steps[f.step].EndTime = f.message, t.e.now()
	}
	begun := false
	for _, sr := range t.steps {
		begun = begun || undoable(sr.GetPhase())
	}
	err := t.commit(func(tx *state.Tx, rec *agentv1.TaskRecord) error {
		rec.Undoing, rec.Reason, rec.Message = true, f.reason, f.message
		if f.reason == reasonCancelled {
			rec.Message = strings.TrimSuffix(cancelMessage(rec)+"; "+f.message, "; ")
		}
		if f.step >= 0 {
			if err := tx.PutStep(t.id, uint32(f.step), t.steps[f.step]); err != nil {
				return err
			}
			if !undoable(t.steps[f.step].GetPhase()) { // no command was started
				tx.DeleteOutput(state.Output{TaskID: t.id, Step: uint32(f.step)})
			}
		}
		if !begun {
			return nil
		}
		return t.emit(tx, rec, &taskv1.Event{Payload: &taskv1.Event_Undoing{Undoing: &taskv1.TaskUndoing{
			TaskId: t.id, Reason: rec.GetReason(), Message: rec.GetMessage(),
		}}})
	})
	if err != nil {
		return err
	}
	crash.Point("executor.undo.turned")
	t.log.WarnContext(ctx, "task turns to undo", "reason", t.rec.GetReason(), "why", t.rec.GetMessage())
	return nil
}

// backward undoes, the last first, every step that may have changed the node.
func (t *task) backward(ctx context.Context) error {
	for i := len(t.steps) - 1; i >= 0; i-- {
		if !undoable(t.steps[i].GetPhase()) {
			continue
		}
		err := t.undo(ctx, i)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errJournal):
			return err
		case err != nil:
			t.steps[i].Error = "undo: " + err.Error()
			return t.hold(ctx, reasonUndoFailed, fmt.Sprintf(
				"it failed (%s), and then the undo of step %d (%s) failed: %v; put that right by hand, then settle the task with task resolve",
				t.rec.GetMessage(), i, t.plan.GetSteps()[i].GetTitle(), err), i, t.steps[i])
		}
	}
	e := end{state: failed, reason: t.rec.GetReason(), message: t.rec.GetMessage() + t.undoReport(), undo: t.undone()}
	if t.rec.GetReason() == reasonCancelled {
		e.state = cancelled
	}
	return t.finish(ctx, e)
}

// undo undoes one step.
func (t *task) undo(ctx context.Context, i int) error {
	sr, planned := t.steps[i], t.plan.GetSteps()[i]
	step, err := t.e.cfg.Registry.Open(planned)
	if err != nil {
		return err
	}
	if sr.GetPhase() != taskv1.StepPhase_STEP_PHASE_UNDOING {
		sr.Phase, sr.UndoBegan = taskv1.StepPhase_STEP_PHASE_UNDOING, durationpb.New(t.spent())
		if err := t.putStep(i); err != nil {
			return err
		}
		crash.Point("executor.undo.begun")
	}
	crash.Point("executor.undo.step")
	limited, done := t.undoing(ctx, i)
	defer done()
	_, err = retry(limited, t, undoTries, func() (struct{}, error) {
		return struct{}{}, step.Undo(limited, t.e.cfg.Hosts.ForStep(t.id, uint32(i)), sr.GetBefore())
	})
	crash.Point("executor.undo.changed")
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, tasks.ErrIrreversible):
		sr.Phase = taskv1.StepPhase_STEP_PHASE_NOT_UNDOABLE
	case err != nil:
		return err
	default:
		sr.Phase = taskv1.StepPhase_STEP_PHASE_UNDONE
	}
	sr.EndTime = t.e.now()
	if err := t.putStep(i); err != nil {
		return err
	}
	crash.Point("executor.undo.undone")
	return nil
}

// undoing gives the undo of a step its time, which a restart does not begin
// anew. However long the agent was away, it is tried once more.
func (t *task) undoing(ctx context.Context, i int) (context.Context, func()) {
	d := max(t.plan.GetSteps()[i].GetTimeout().AsDuration(), stepTimeout)
	d -= max(0, t.spent()-t.steps[i].GetUndoBegan().AsDuration())
	return context.WithTimeoutCause(ctx, max(d, lastCheck), errStepTimeout)
}

// undone says what became of the steps.
func (t *task) undone() taskv1.UndoState {
	out := taskv1.UndoState_UNDO_STATE_NOT_NEEDED
	for _, sr := range t.steps {
		switch sr.GetPhase() {
		case taskv1.StepPhase_STEP_PHASE_NOT_UNDOABLE:
			return taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE
		case taskv1.StepPhase_STEP_PHASE_UNDONE:
			out = taskv1.UndoState_UNDO_STATE_COMPLETE
		default:
		}
	}
	return out
}

// holdUnknown holds a task of which a step may or may not have happened, or may
// happen yet.
func (t *task) holdUnknown(ctx context.Context, err error) error {
	i, reason := len(t.steps)-1, reasonOutcomeUnknown
	var u *unknown
	if errors.As(err, &u) {
		i = u.step
	}
	if errors.Is(err, errHangs) {
		reason = reasonHostHangs
	}
	t.steps[i].Error = err.Error()
	return t.hold(ctx, reason, fmt.Sprintf(
		"step %d (%s): %v; it is never run again by itself: see on the node what it did, then settle the task with task resolve",
		i, t.plan.GetSteps()[i].GetTitle(), err), i, t.steps[i])
}

// hold gives the task to a person. It keeps its locks and gives its credit
// back. A restore is not held: its intent is suspended.
func (t *task) hold(ctx context.Context, reason, message string, i int, sr *agentv1.StepRecord) error {
	if t.quiet() {
		return t.finish(ctx, end{state: failed, undo: taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE, reason: reason, message: message})
	}
	err := t.commit(func(tx *state.Tx, rec *agentv1.TaskRecord) error {
		rec.State, rec.Reason, rec.Message = taskv1.TaskState_TASK_STATE_HELD, reason, message
		if sr != nil {
			if err := tx.PutStep(t.id, uint32(i), sr); err != nil {
				return err
			}
		}
		if rec.GetEvents() >= MaxEvents-1 {
			return nil // the server was told before, and not that it went on
		}
		return t.emit(tx, rec, &taskv1.Event{Payload: &taskv1.Event_Held{Held: &taskv1.TaskHeld{
			TaskId: t.id, Reason: reason, Message: message, Steps: outcomes(t.steps),
		}}})
	})
	if err != nil {
		return err
	}
	crash.Point("executor.held")
	t.e.locks.stick(t.grant)
	t.log.ErrorContext(ctx, "task is held", "reason", reason, "why", message)
	return nil
}
