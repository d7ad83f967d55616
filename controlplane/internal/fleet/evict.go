package fleet

import (
	"context"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// page is how many rows are read at a time.
const page = 500

// Evict ends a node's membership: its session is cut and its certificate is
// refused from now on. What was never sent to it is cancelled; the rest is
// abandoned, since no one will say what became of it. A node that was evicted
// is left as it is. The error of an unknown node wraps [store.ErrNotFound].
func (f *Fleet) Evict(ctx context.Context, actor, node, reason string) error {
	crash.Point("server.evict.before")
	err := f.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) error {
		row, err := tx.Node(node)
		if err != nil || row.GetEvicted() {
			return err
		}
		if err := tx.Append(actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_NodeEvicted{NodeEvicted: &auditv1.NodeEvicted{
			Node: node, Reason: reason}}}); err != nil {
			return err
		}
		if err := f.endTasks(tx, node, store.Queued, taskv1.TaskState_TASK_STATE_CANCELLED, "its node was evicted before the task was sent"); err != nil {
			return err
		}
		return f.endTasks(tx, node, store.Sent, taskv1.TaskState_TASK_STATE_ABANDONED, "its node was evicted, so no one will say what became of it")
	})
	if err != nil {
		return err
	}
	crash.Point("server.evict.committed")
	if err := f.refresh(ctx, node); err != nil {
		return err
	}
	f.cfg.Sessions.Cut(node, "EVICTED", "this node was evicted; let it join again with a new token")
	if f.cfg.Board != nil {
		f.cfg.Board.Forget(node)
	}
	return nil
}

// endTasks gives all open tasks of one sort a last state. It is the server that
// decides, so that it asserts nothing in a person's name.
func (f *Fleet) endTasks(tx *eventlog.Tx, node string, which store.Open, state taskv1.TaskState, message string) error {
	for after := uint64(0); ; {
		rows, err := tx.OpenTasks(node, which, after, page)
		if err != nil {
			return err
		}
		for _, row := range rows {
			after = row.GetTask().GetCreateIndex()
			if err := tx.Append(f.cfg.Actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{
				TaskId: row.GetTask().GetId(), Node: node, State: state, Reason: "NODE_EVICTED", Message: message,
			}}}); err != nil {
				return err
			}
		}
		if len(rows) < page {
			return nil
		}
	}
}
