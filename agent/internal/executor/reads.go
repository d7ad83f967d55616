package executor

import (
	"context"
	"fmt"
	"slices"

	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// Unfinished returns the accepted tasks that have not ended, in the order of
// their acceptance.
func (e *Executor) Unfinished(context.Context) ([]*agentv1.UnfinishedTask, error) {
	var recs []*agentv1.TaskRecord
	err := e.cfg.Journal.View(func(tx *state.Tx) error {
		return tx.Open(func(id string, _ taskv1.TaskState) error {
			rec, err := tx.Task(id)
			if err == nil && rec.GetOrigin() == state.OriginTask {
				recs = append(recs, rec)
			}
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("read unfinished tasks: %w", err)
	}
	slices.SortFunc(recs, func(a, b *agentv1.TaskRecord) int { return int(int64(a.GetAcceptSeq()) - int64(b.GetAcceptSeq())) })
	out := make([]*agentv1.UnfinishedTask, len(recs))
	for i, rec := range recs {
		out[i] = &agentv1.UnfinishedTask{TaskId: rec.GetTaskId(), LeafHash: rec.GetLeafHash(), State: rec.GetState()}
	}
	return out, nil
}

// Problem says why the journal could not be written last, or nil when it could.
func (e *Executor) Problem() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.broken
}
