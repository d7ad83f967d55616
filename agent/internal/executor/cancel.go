package executor

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// ErrUnknownTask is returned for a task that the journal does not have.
var ErrUnknownTask = errors.New("the node does not know the task")

// Cancel makes durable that a task is to be stopped. One that waits ends; one
// that runs a command has it stopped; any other stops at the edge of its step,
// and is then undone. It is too late, and no error, once the final check has
// begun, and for a task that is held or has ended. [ErrUnknownTask] is returned
// for a task, or a leaf hash, that the journal does not have.
func (e *Executor) Cancel(ctx context.Context, req *agentv1.CancelRequest) error {
	id, late := req.GetTaskId(), ""
	err := e.update(func(tx *state.Tx) error {
		rec, err := tx.Task(id)
		if errors.Is(err, state.ErrNotFound) || err == nil && !sameHash(rec.GetLeafHash(), req.GetLeafHash()) {
			return fmt.Errorf("cancel task %s: %w", id, ErrUnknownTask)
		}
		if err != nil {
			return err
		}
		if late = tooLate(rec); late != "" || rec.GetCancelRequested() {
			return nil
		}
		rec.CancelRequested = true
		rec.CancelReason = fmt.Sprintf("%s asked to cancel it", req.GetRequestedBy())
		if why := req.GetReason(); why != "" {
			rec.CancelReason += ": " + why
		}
		return tx.PutTask(rec)
	})
	if err != nil {
		return err
	}
	crash.Point("executor.cancel.committed")
	if late != "" {
		e.log.InfoContext(ctx, "cancel came too late", "task_id", id, "why", late)
		return nil
	}
	e.mu.Lock()
	t := e.live[id]
	e.mu.Unlock()
	if t != nil {
		t.cancel.on()
	}
	return nil
}

func tooLate(rec *agentv1.TaskRecord) string {
	switch {
	case state.Terminal(rec.GetState()):
		return "it has ended"
	case rec.GetState() == taskv1.TaskState_TASK_STATE_HELD:
		return "it is held; a person has to settle it"
	case rec.GetUndoing():
		return "it is being undone"
	case rec.GetFinalVerifyBegun():
		return "its final check has begun"
	}
	return ""
}
