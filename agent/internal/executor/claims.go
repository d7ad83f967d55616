package executor

import (
	"errors"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// Claims returns who has locks and who waits for them, in the order in which
// they asked. A task that waits for something else is not among them.
func (e *Executor) Claims() ([]*agentv1.LockClaim, error) {
	var out []*agentv1.LockClaim
	err := e.cfg.Journal.View(func(tx *state.Tx) error {
		for _, c := range e.locks.claims() {
			if len(c.locks) == 0 {
				continue
			}
			claim := &agentv1.LockClaim{TaskId: c.owner, Granted: c.held, Held: c.stuck, Behind: c.behind}
			for _, l := range c.locks {
				name := l.Name
				if l.Shared {
					name += " (shared)"
				}
				claim.Names = append(claim.Names, name)
			}
			rec, err := tx.Task(c.owner)
			if err != nil && !errors.Is(err, state.ErrNotFound) {
				return err
			}
			claim.Since, claim.Kind = since(rec, c.held), kindOf(rec.GetSignedLeaf())
			out = append(out, claim)
		}
		return nil
	})
	return out, err
}

// since is when a task got its locks, or began to wait for them, as the journal
// has it.
func since(rec *agentv1.TaskRecord, granted bool) *timestamppb.Timestamp {
	switch {
	case granted && rec.GetStartTime() != nil:
		return rec.GetStartTime()
	case rec.GetWaitTime() != nil:
		return rec.GetWaitTime()
	}
	return rec.GetAcceptTime()
}
