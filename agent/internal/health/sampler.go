package health

import (
	"context"
	"time"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/health/kernel"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

const (
	// inventoryEvery is how often the inventory is read without a reason.
	inventoryEvery = time.Hour
	// looksApart is the least time between two looks that events asked for.
	looksApart = time.Second
	// logAgain is the pause before a log that cannot be read is opened again.
	logAgain = 30 * time.Second
)

// asks reads the inventory when it may have changed, and samples in tiers.
func (m *Monitor) asks(ctx context.Context) {
	var starts uint64
	var inventory, slow time.Duration // when they were read last
	count := -1
	for ctx.Err() == nil {
		changed := m.cfg.Driver.Changed()
		st := m.cfg.Driver.Status()
		m.give(ctx, func(e *engine, t moment) bool { e.status(st, t); return false })
		if st.GetState() != gpuv1.DriverState_DRIVER_STATE_OK {
			clock.Wait(ctx, m.cfg.Period, changed)
			continue
		}
		begun := m.cfg.Clock.Boot()
		if starts != st.GetStarts() || begun-inventory >= inventoryEvery {
			if inv, err := m.cfg.Driver.Inventory(ctx); err == nil {
				starts, inventory, slow, count = st.GetStarts(), begun, 0, len(inv.GetGpus())
				m.giveInventory(ctx, inv)
			}
		}
		tier := gpuv1.Tier_TIER_FAST
		if slow == 0 || begun-slow >= m.cfg.SlowPeriod {
			tier = gpuv1.Tier_TIER_SLOW
		}
		if s, err := m.cfg.Driver.Sample(ctx, tier); err == nil {
			if tier == gpuv1.Tier_TIER_SLOW {
				slow = begun
			}
			if s.Count != nil && int(s.GetCount()) != count {
				starts = 0 // who is there has changed
				count = int(s.GetCount())
			}
			m.give(ctx, func(e *engine, t moment) bool { e.takeSample(s, t); return false })
		}
		m.pause(ctx, changed, m.cfg.Period-(m.cfg.Clock.Boot()-begun))
	}
}

func (m *Monitor) giveInventory(ctx context.Context, inv *gpuv1.Inventory) {
	m.give(ctx, func(e *engine, t moment) bool { e.takeInventory(inv, t); return false })
}

// pause waits for the next period, for an event that wants a look, or for the
// driver to change its state.
func (m *Monitor) pause(ctx context.Context, changed <-chan struct{}, left time.Duration) {
	apart := min(looksApart, left)
	if !clock.Wait(ctx, max(0, apart), changed) {
		return
	}
	timer := time.NewTimer(max(0, left-apart))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-changed:
	case <-m.kick:
	case <-timer.C:
	}
}

// listen takes the driver's events as they come.
func (m *Monitor) listen(ctx context.Context) {
	for ctx.Err() == nil {
		changed := m.cfg.Driver.Changed()
		if m.cfg.Driver.Status().GetState() != gpuv1.DriverState_DRIVER_STATE_OK {
			clock.Wait(ctx, clock.LookAgain, changed)
			continue
		}
		events, err := m.cfg.Driver.Events(ctx)
		if err != nil {
			clock.Wait(ctx, m.cfg.Period, changed)
			continue
		}
		for _, ev := range events {
			m.give(ctx, func(e *engine, t moment) bool { return e.takeEvent(ev, t) })
		}
	}
}

// readLog follows the kernel's log, once it is known which GPUs there are, or
// that the driver does not say.
func (m *Monitor) readLog(ctx context.Context) {
	if m.cfg.KernelLog == "" {
		return
	}
	for ctx.Err() == nil && !m.known() {
		clock.Wait(ctx, m.cfg.Period, m.Changed())
	}
	for ctx.Err() == nil {
		r, err := kernel.Open(m.cfg.KernelLog)
		if err == nil {
			m.give(ctx, func(e *engine, t moment) bool { e.kernelLog(nil, t); return false })
			err = m.records(ctx, r)
		}
		if ctx.Err() == nil {
			m.give(ctx, func(e *engine, t moment) bool { e.kernelLog(err, t); return false })
			clock.Sleep(ctx, logAgain)
		}
	}
}

func (m *Monitor) records(ctx context.Context, r *kernel.Reader) error {
	defer r.Close() //nolint:errcheck // it was only read
	var parser kernel.Parser
	for {
		rec, err := r.Next(ctx)
		if err != nil {
			return err
		}
		if lost := r.Lost(); lost > 0 {
			m.mu.Lock()
			m.lost = lost
			m.mu.Unlock()
		}
		if reports := parser.Parse(rec); len(reports) > 0 && !m.line(ctx, rec, reports) {
			return ctx.Err()
		}
	}
}

// known reports whether it is known which GPUs there are, or that the driver
// does not say.
func (m *Monitor) known() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch m.engine.driver.GetState() {
	case gpuv1.DriverState_DRIVER_STATE_OFF, gpuv1.DriverState_DRIVER_STATE_NO_GPUS,
		gpuv1.DriverState_DRIVER_STATE_STARTING, gpuv1.DriverState_DRIVER_STATE_QUIESCED, gpuv1.DriverState_DRIVER_STATE_UNSPECIFIED:
		return false
	case gpuv1.DriverState_DRIVER_STATE_OK:
		return m.engine.inventory != nil
	default:
		return true
	}
}
