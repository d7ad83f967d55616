package executor

import (
	"context"
	"errors"

	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// forget deletes what is kept of a task that has ended, while it still has its
// locks. What stays is deleted at the next sweep, or when the agent starts
// again.
func (e *Executor) forget(ctx context.Context, id string) {
	k, ok := e.cfg.Hosts.(Keeper)
	if !ok {
		return
	}
	err := k.Forget(ctx, id)
	if err != nil && ctx.Err() == nil {
		err = k.Forget(ctx, id) // old secrets are worth a second try
	}
	if err != nil && ctx.Err() == nil {
		e.log.WarnContext(ctx, "what was kept of a task is not deleted", "task_id", id, "err", err)
	}
}

// forgetEnded does so for all tasks that ended before, also in an earlier life.
func (e *Executor) forgetEnded(ctx context.Context) {
	k, ok := e.cfg.Hosts.(Keeper)
	if !ok {
		return
	}
	ids, err := k.Kept()
	if err != nil {
		e.log.WarnContext(ctx, "what was kept of tasks is not listed", "err", err)
		return
	}
	for _, id := range ids {
		var rec *agentv1.TaskRecord
		err := e.cfg.Journal.View(func(tx *state.Tx) (err error) {
			rec, err = tx.Task(id)
			return err
		})
		if errors.Is(err, state.ErrNotFound) || err == nil && state.Terminal(rec.GetState()) {
			e.forget(ctx, id)
		}
	}
}
