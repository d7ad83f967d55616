package fleet

import (
	"context"
	"errors"
	"time"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/enrolv1"
)

const (
	// recordEvery is how often denied tokens go into the log, so that someone
	// who guesses fills no disk.
	recordEvery = time.Minute
	// maxDenials bounds how many kinds of denials are told apart.
	maxDenials = 1000
)

// denial is one kind of denied token.
type denial struct{ node, reason string }

// deny counts a token that was not good.
func (f *Fleet) deny(node string, err error) {
	d := denial{node: node}
	switch {
	case errors.Is(err, enrolv1.ErrTokenUnknown):
		d.reason = "UNKNOWN"
	case errors.Is(err, enrolv1.ErrTokenExpired):
		d.reason = "EXPIRED"
	case errors.Is(err, enrolv1.ErrTokenUsed):
		d.reason = "USED"
	case errors.Is(err, enrolv1.ErrTokenVoid):
		d.reason = "VOID"
	default:
		return
	}
	f.deniedMu.Lock()
	defer f.deniedMu.Unlock()
	if _, known := f.denied[d]; known || len(f.denied) < maxDenials {
		f.denied[d]++
	}
}

// Run records denied tokens until ctx ends.
func (f *Fleet) Run(ctx context.Context) error {
	tick, old := time.NewTicker(recordEvery), time.NewTicker(trimEvery)
	defer tick.Stop()
	defer old.Stop()
	for trim := true; ; {
		if trim {
			if err := f.trim(ctx); err != nil && ctx.Err() == nil {
				f.cfg.Logger.Error("histories of GPU conditions not trimmed", "err", err)
			}
			trim = false
		}
		select {
		case <-old.C:
			trim = true
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			return f.recordDenied(ctx)
		case <-tick.C:
			if err := f.recordDenied(ctx); err != nil && ctx.Err() == nil {
				f.cfg.Logger.Error("denied join tokens not recorded", "err", err)
			}
		}
	}
}

func (f *Fleet) recordDenied(ctx context.Context) error {
	f.deniedMu.Lock()
	denied := f.denied
	f.denied = map[denial]uint32{}
	f.deniedMu.Unlock()
	if len(denied) == 0 {
		return nil
	}
	crash.Point("server.denied.before")
	err := f.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) error {
		for d, n := range denied {
			if err := tx.Append(f.cfg.Actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_JoinDenied{JoinDenied: &auditv1.JoinDenied{
				Node: d.node, Reason: d.reason, Count: n}}}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	crash.Point("server.denied.committed")
	return nil
}
