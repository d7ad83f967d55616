package executor

import (
	"context"
	"errors"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// closeSlice bounds the tasks that one transaction of an acknowledgement
// closes.
const closeSlice = 50

// NextEvents returns at most limit frames that follow after, in order and
// without a hole, and waits until there are any or ctx ends. gap says that the
// frames between after and the first one returned are gone for good. The frames
// are the caller's.
func (e *Executor) NextEvents(ctx context.Context, after uint64, limit int) (journalID string, frames [][]byte, gap bool, err error) {
	return e.cfg.Journal.NextFrames(ctx, after, limit)
}

// Ack records that the server has the frames of a journal up to seq. One of
// another journal is ignored; one beyond the last frame is [state.ErrAckAhead].
// Once a task's last event is acknowledged, what its steps kept for an undo is
// erased.
func (e *Executor) Ack(_ context.Context, journalID string, seq uint64) error {
	crash.Point("executor.ack.before")
	err := e.update(func(tx *state.Tx) error {
		meta, err := tx.Journal()
		if err != nil || meta.GetJournalId() != journalID {
			return err
		}
		return tx.Acknowledge(seq)
	})
	if err != nil {
		return err
	}
	crash.Point("executor.ack.committed")
	for more := true; more; {
		n := 0
		err := e.update(func(tx *state.Tx) error {
			return tx.Closed(closeSlice, func(id string) error {
				n++
				return acknowledged(tx, id)
			})
		})
		if err != nil {
			return err
		}
		crash.Point("executor.ack.closed")
		more = n == closeSlice
	}
	return nil
}

// acknowledged notes that the server has the last event of a task, and erases
// what the task kept for its undo: it may hold secrets.
func acknowledged(tx *state.Tx, id string) error {
	rec, err := tx.Task(id)
	if errors.Is(err, state.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	err = tx.Steps(id, func(i uint32, sr *agentv1.StepRecord) error {
		if sr.GetBefore() == nil {
			return nil
		}
		sr.Before = nil
		return tx.PutStep(id, i, sr)
	})
	if err != nil {
		return err
	}
	rec.Acknowledged = true
	return tx.PutTask(rec)
}
