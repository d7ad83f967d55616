package agent

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// keepEvery is how old the high water on the disk may be while nothing else is
// written.
const keepEvery = 10 * time.Minute

// keepTime writes the high water of the clock from time to time, so that a
// machine that starts with a wrong clock knows better.
func (n *node) keepTime(ctx context.Context) error {
	for clock.Sleep(ctx, keepEvery) {
		if err := n.store.Update(func(tx *state.Tx) error { tx.Mark(); return nil }); err != nil && ctx.Err() == nil {
			n.log.WarnContext(ctx, "high water of the clock not kept", "err", err)
		}
	}
	return nil
}

func (n *node) clockStatus() *agentv1.ClockStatus {
	high, sure := n.time.Kept()
	st := &agentv1.ClockStatus{
		WallTime: timestamppb.New(n.cfg.Clock.Now()), HighWater: timestamppb.New(high), SureTime: timestamppb.New(sure),
		Synchronised: n.cfg.Synchronised(),
	}
	if err := n.time.Doubt(); err != nil {
		st.Doubt = err.Error()
	}
	return st
}

// ResetClock takes root's word that the wall clock is right: it becomes the high
// water and the floor. Windows that lie before it are open no more, since what
// was signed until now is refused.
func (a *answers) ResetClock(ctx context.Context) (before, now time.Time, err error) {
	n, problem := (*Agent)(a).current()
	if n == nil {
		return before, now, fmt.Errorf("there is no journal yet: %w", problem)
	}
	_, sure := n.time.Kept()
	before, now = n.time.Reset()
	if err := n.store.Update(func(tx *state.Tx) error { return tx.ResetClock(now) }); err != nil {
		n.time.Load(before, sure)
		return before, now, fmt.Errorf("keep the clock: %w", err)
	}
	n.log.WarnContext(ctx, "clock reset by root", "before", before, "now", now)
	select {
	case n.reset <- struct{}{}:
	default:
	}
	return before, now, nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
