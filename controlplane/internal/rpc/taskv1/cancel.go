package taskv1

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const maxReason = 1 << 10

// CancelTask asks for a task to be stopped. One that waits in the queue is
// cancelled at once; of one that was sent, only its node can say.
func (s *Service) CancelTask(ctx context.Context, req *taskv1.CancelTaskRequest) (*taskv1.CancelTaskResponse, error) {
	if n := len(req.GetReason()); n > maxReason {
		return nil, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "reason", Value: fmt.Sprintf("%d bytes", n),
			Rule: fmt.Sprintf("it may have at most %d bytes", maxReason)})
	}
	caller := intercept.CallerFrom(ctx).Name()
	var row *serverv1.TaskRow
	crash.Point("server.cancel.before")
	err := s.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) (err error) {
		row, err = s.cancel(tx, caller, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	crash.Point("server.cancel.committed")
	if store.OpenAs(row.GetTask().GetState()) == store.Sent {
		s.cfg.Sessions.Cancel(row.GetTask().GetNode(), row.GetTask().GetId())
	}
	task, err := s.whole(row)
	if err != nil {
		return nil, err
	}
	return &taskv1.CancelTaskResponse{Task: task}, nil
}

func (s *Service) cancel(tx *eventlog.Tx, caller string, req *taskv1.CancelTaskRequest) (*serverv1.TaskRow, error) {
	row, err := find(tx, req.GetId())
	if err != nil {
		return nil, err
	}
	task := row.GetTask()
	switch {
	case store.Terminal(task.GetState()):
		return nil, rpcerr.New(codes.FailedPrecondition, "TASK_ENDED", "task %s has ended as %s; there is nothing to cancel", task.GetId(), stateWord(task.GetState()))
	case task.GetState() == taskv1.TaskState_TASK_STATE_HELD:
		return nil, rpcerr.New(codes.FailedPrecondition, "TASK_HELD",
			"task %s is held: nothing more of it runs that could be cancelled; settle it with: millctl task resolve %s --as undo|accept|abandon --reason WHY", task.GetId(), task.GetId())
	case task.GetCancelRequested():
		return row, nil // the first request counts; the node is asked again
	}
	if err := tx.Append(caller, &auditv1.LogEntry{Entry: &auditv1.LogEntry_CancelRequested{CancelRequested: &auditv1.CancelRequested{
		TaskId: task.GetId(), Node: task.GetNode(), Reason: req.GetReason()}}}); err != nil {
		return nil, err
	}
	if task.GetState() == taskv1.TaskState_TASK_STATE_QUEUED {
		if err := tx.Append(s.cfg.Actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{
			TaskId: task.GetId(), Node: task.GetNode(), State: taskv1.TaskState_TASK_STATE_CANCELLED,
			Reason: "CANCELLED", Message: "cancelled before the node took it"}}}); err != nil {
			return nil, err
		}
	}
	return tx.Task(task.GetId())
}
