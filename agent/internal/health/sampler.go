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

// asked is what the driver was asked last, and when.
type asked struct {
	starts          uint64 // of the program that read the inventory; 0: read it anew
	inventory, slow time.Duration
	count           int // of GPUs
}

// asks reads the inventory when it may have changed, and samples in tiers.
func (m *Monitor) asks(ctx context.Context) {
	last := asked{count: -1}
	for ctx.Err() == nil {
		changed := m.cfg.Driver.Changed()
		st := m.cfg.Driver.Status()
		m.giveStatus(ctx)
		if st.GetState() != gpuv1.DriverState_DRIVER_STATE_OK {
			clock.Wait(ctx, m.cfg.Period, changed)
			continue
		}
		begun := m.cfg.Clock.Boot()
		if last.starts != st.GetStarts() || begun-last.inventory >= inventoryEvery {
			m.readInventory(ctx, &last, st.GetStarts())
		}
		tier := gpuv1.Tier_TIER_FAST
		if last.slow == 0 || begun-last.slow >= m.cfg.SlowPeriod || m.wanted() {
			tier = gpuv1.Tier_TIER_SLOW
		}
		if s, err := m.cfg.Driver.Sample(ctx, tier); err == nil {
			if tier == gpuv1.Tier_TIER_SLOW {
				last.slow = begun
			}
			if s.Count != nil && int(s.GetCount()) != last.count {
				// Who is there has changed: read at once who, so that the first word on
				// it has the name.
				last.starts = 0
				m.readInventory(ctx, &last, st.GetStarts())
				last.count = int(s.GetCount())
			}
			m.give(ctx, func(e *engine, t moment) bool { e.takeSample(s, t); return false })
		}
		m.pause(ctx, changed, m.cfg.Period-(m.cfg.Clock.Boot()-begun))
	}
}

// wanted takes the wish that all be read.
func (m *Monitor) wanted() bool {
	select {
	case <-m.full:
		return true
	default:
		return false
	}
}

func (m *Monitor) readInventory(ctx context.Context, last *asked, starts uint64) {
	inv, err := m.cfg.Driver.Inventory(ctx)
	if err != nil {
		return
	}
	*last = asked{starts: starts, inventory: m.cfg.Clock.Boot(), count: len(inv.GetGpus())}
	m.giveInventory(ctx, inv)
}

func (m *Monitor) giveInventory(ctx context.Context, inv *gpuv1.Inventory) {
	m.give(ctx, func(e *engine, t moment) bool { e.takeInventory(inv, t); return false })
}

// states takes each change of the driver's state at once, also while a question
// is without an answer.
func (m *Monitor) states(ctx context.Context) {
	for ctx.Err() == nil {
		changed := m.cfg.Driver.Changed()
		m.giveStatus(ctx)
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
}

// giveStatus hands on the state as it is when it is taken, so that two who hand
// it on cannot bring an old one.
func (m *Monitor) giveStatus(ctx context.Context) {
	m.give(ctx, func(e *engine, t moment) bool { e.status(m.cfg.Driver.Status(), t); return false })
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
	case gpuv1.DriverState_DRIVER_STATE_OK, gpuv1.DriverState_DRIVER_STATE_NO_ANSWER_YET:
		return m.engine.inventory != nil
	default:
		return true
	}
}
