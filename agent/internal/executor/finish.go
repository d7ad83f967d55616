package executor

import (
	"context"
	"errors"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

const (
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	failed    = taskv1.TaskState_TASK_STATE_FAILED
	cancelled = taskv1.TaskState_TASK_STATE_CANCELLED
	refused   = taskv1.TaskState_TASK_STATE_REFUSED
	expired   = taskv1.TaskState_TASK_STATE_EXPIRED
	abandoned = taskv1.TaskState_TASK_STATE_ABANDONED
)

// end is how a task ends.
type end struct {
	state           taskv1.TaskState
	undo            taskv1.UndoState // of one that did not succeed
	reason, message string
	result          *anypb.Any
	digest          []byte // of a plan that is not carried out
	assertedBy      string
}

// finish ends the task: its state, its last event and what becomes of the
// intent are one transaction.
func (t *task) finish(ctx context.Context, e end) error {
	crash.Point("executor.finish.before")
	err := t.commit(func(tx *state.Tx, rec *agentv1.TaskRecord) error { return t.end(tx, rec, e) })
	if err != nil {
		return err
	}
	crash.Point("executor.finish.committed")
	t.e.forget(ctx, t.id)
	t.releaseLocks()
	t.log.InfoContext(ctx, "task ended", "state", e.state.String(), "reason", t.rec.GetReason(), "why", t.rec.GetMessage(), "undo", t.rec.GetUndo().String())
	return nil
}

// end writes the end of the task into a transaction.
func (t *task) end(tx *state.Tx, rec *agentv1.TaskRecord, e end) error {
	if e.state != succeeded && e.undo == taskv1.UndoState_UNDO_STATE_UNSPECIFIED {
		e.undo = taskv1.UndoState_UNDO_STATE_NOT_NEEDED
	}
	if e.state == cancelled && e.message == "" {
		e.message = cancelMessage(rec)
	}
	if e.digest == nil {
		e.digest = rec.GetPlanDigest()
	}
	rec.State, rec.Undo, rec.Reason, rec.Message = e.state, e.undo, e.reason, e.message
	rec.Result, rec.EndTime, rec.AssertedBy = e.result, t.e.now(), e.assertedBy
	if t.quiet() {
		return t.endRestore(tx, rec)
	}
	if err := t.settleIntent(tx, rec); err != nil {
		return err
	}
	rec.Events++
	seq, err := tx.Append(&taskv1.Event{Payload: &taskv1.Event_Finished{Finished: &taskv1.TaskFinished{
		TaskId: t.id, State: e.state, Undo: e.undo, Reason: e.reason, Message: e.message, Result: e.result,
		Steps: outcomes(t.steps), PlanDigest: e.digest, AssertedBy: e.assertedBy,
	}}})
	if err != nil {
		return err
	}
	tx.Closing(seq, t.id)
	return nil
}

// restIntent puts an intent to rest that the task is about to supersede or
// end: it must not be restored meanwhile.
func (t *task) restIntent(tx *state.Tx) error {
	key, change := t.kind.Intent(t.spec)
	if change == tasks.IntentNone || t.quiet() {
		return nil
	}
	in, err := tx.Intent(key)
	if errors.Is(err, state.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	in.State, in.RestingFor = taskv1.IntentState_INTENT_STATE_RESTING, t.id
	return tx.PutIntent(in)
}

// settleIntent writes what the end of the task makes of the intent under its
// key. One that was put to rest is in force again only when the node is as it
// was.
func (t *task) settleIntent(tx *state.Tx, rec *agentv1.TaskRecord) error {
	if t.kind == nil || t.leaf.GetMode() == taskv1.Mode_MODE_PLAN {
		return nil
	}
	key, change := t.kind.Intent(t.spec)
	if change == tasks.IntentNone {
		return nil
	}
	if rec.GetState() != succeeded {
		return t.wakeIntent(tx, rec, key)
	}
	ev := &taskv1.IntentChanged{Key: key, TaskId: t.id, State: taskv1.IntentState_INTENT_STATE_ACTIVE}
	if change == tasks.IntentRemove {
		if _, err := tx.Intent(key); errors.Is(err, state.ErrNotFound) {
			return nil
		}
		tx.DeleteIntent(key)
		ev.State = taskv1.IntentState_INTENT_STATE_REMOVED
	} else if err := tx.PutIntent(&agentv1.IntentRecord{
		Key: key, TaskId: t.id, SignedLeaf: proto.CloneOf(rec.GetSignedLeaf()), Envelope: proto.CloneOf(rec.GetEnvelope()),
		TrustRootVersion: rec.GetTrustRootVersion(), State: ev.State, Since: t.e.now(),
	}); err != nil {
		return err
	}
	return t.emit(tx, rec, &taskv1.Event{Payload: &taskv1.Event_IntentChanged{IntentChanged: ev}})
}

func (t *task) wakeIntent(tx *state.Tx, rec *agentv1.TaskRecord, key string) error {
	in, err := tx.Intent(key)
	if errors.Is(err, state.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	untouched := rec.GetUndo() == taskv1.UndoState_UNDO_STATE_NOT_NEEDED || rec.GetUndo() == taskv1.UndoState_UNDO_STATE_COMPLETE
	if in.GetRestingFor() != t.id || !untouched {
		return nil
	}
	in.State, in.RestingFor = taskv1.IntentState_INTENT_STATE_ACTIVE, ""
	return tx.PutIntent(in)
}
