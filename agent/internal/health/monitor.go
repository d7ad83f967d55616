package health

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/health/kernel"
	"github.com/gpuaas/millwright/agent/internal/health/xid"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// Driver is how the GPUs are asked; see package gpu.
type Driver interface {
	// Inventory reads what the GPUs are.
	Inventory(ctx context.Context) (*gpuv1.Inventory, error)
	// Sample reads how they are.
	Sample(ctx context.Context, tier gpuv1.Tier) (*gpuv1.Sample, error)
	// Events waits a while for events.
	Events(ctx context.Context) ([]*gpuv1.GpuEvent, error)
	// Status is whether they can be asked.
	Status() *gpuv1.DriverStatus
	// Changed is closed at the next change of the status.
	Changed() <-chan struct{}
}

// Journal is where changes are told, and what was told is remembered.
type Journal interface {
	// Known is what was told.
	Known() (Known, error)
	// Room reports whether edges may be numbered now. While not, they are folded.
	Room() bool
	// Tell makes a change durable, all of it or nothing.
	Tell(c Change) error
}

// Config is what a Monitor needs. Fields without "optional" must be set.
type Config struct {
	Driver  Driver
	Journal Journal
	Clock   clock.Clock
	Logger  *slog.Logger
	// BootID is the kernel's boot id.
	BootID string
	// XIDs says what XIDs mean.
	XIDs *xid.Table
	// Period is how often the fast values are read, and SlowPeriod how often all.
	Period, SlowPeriod time.Duration
	// Expected is how many GPUs the node should have; optional, as many as there
	// were.
	Expected int
	// KernelLog is the kernel's log; optional, none.
	KernelLog string
}

// Monitor looks after the GPUs. Run is called once; the other methods may be
// called at any time.
type Monitor struct {
	cfg  Config
	in   chan input
	kick chan struct{} // holds a token: look at the GPUs at once
	full chan struct{} // holds a token: and at all of them

	mu      sync.Mutex
	engine  *engine       // guarded by mu
	changed chan struct{} // closed at the next report; guarded by mu
	number  uint64        // of the last report; guarded by mu
	lost    uint64        // lines of the kernel's log; guarded by mu
}

// input is something that was seen. It reports whether the GPUs should be looked
// at at once.
type input func(e *engine, t moment) (look bool)

// New returns a Monitor that does nothing until Run.
func New(cfg Config) *Monitor {
	return &Monitor{cfg: cfg, in: make(chan input, 64), kick: make(chan struct{}, 1), full: make(chan struct{}, 1), engine: newEngine(cfg), changed: make(chan struct{})}
}

// Run looks after the GPUs until ctx ends, and returns nil then. It has its
// error when what was told before cannot be read.
func (m *Monitor) Run(ctx context.Context) error {
	known, err := m.cfg.Journal.Known()
	if err != nil {
		return fmt.Errorf("read what was told of the GPUs: %w", err)
	}
	m.mu.Lock()
	m.engine.restore(known, m.now())
	m.mu.Unlock()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { m.follow(ctx); return nil })
	g.Go(func() error { m.states(ctx); return nil })
	g.Go(func() error { m.asks(ctx); return nil })
	g.Go(func() error { m.listen(ctx); return nil })
	g.Go(func() error { m.readLog(ctx); return nil })
	return g.Wait()
}

func (m *Monitor) now() moment { return moment{m.cfg.Clock.Now(), m.cfg.Clock.Boot()} }

// mostAtOnce bounds what is taken before it is told of.
const mostAtOnce = 256

// follow takes what was seen, and tells what changed by it.
func (m *Monitor) follow(ctx context.Context) {
	ticker := time.NewTicker(m.cfg.Period)
	defer ticker.Stop()
	for {
		var first input
		select {
		case <-ctx.Done():
			return
		case first = <-m.in:
		case <-ticker.C:
			first = func(e *engine, t moment) bool { e.tick(t); return false }
		}
		m.take(first)
	}
}

// take takes one thing that was seen and those that are there with it.
func (m *Monitor) take(next input) {
	m.mu.Lock()
	defer m.mu.Unlock()
	look := false
	for n := 0; next != nil; n++ {
		look = next(m.engine, m.now()) || look
		next = nil
		if n < mostAtOnce {
			select {
			case next = <-m.in:
			default:
			}
		}
	}
	if look {
		select {
		case m.kick <- struct{}{}:
		default:
		}
	}
	m.tell()
	close(m.changed)
	m.changed = make(chan struct{})
}

// tell makes durable what changed. What cannot be told now is told later, in one
// edge for each condition.
func (m *Monitor) tell() {
	edges := m.engine.edges()
	if len(edges) == 0 {
		return
	}
	m.engine.version++ // of counts, too
	if !m.cfg.Journal.Room() {
		return
	}
	if err := m.cfg.Journal.Tell(Change{Edges: edges, Cursor: m.engine.cursor}); err != nil {
		m.cfg.Logger.Warn("changes of GPU conditions not written: they are folded until they can be", "conditions", len(edges), "err", err)
		return
	}
	m.engine.told(edges)
	for _, edge := range edges {
		c := edge.GetCondition()
		m.cfg.Logger.Info("GPU condition", "key", c.GetKey(), "state", word(c.GetState()), "severity", c.GetSeverity().String(), "reason", c.GetReason(), "message", c.GetMessage())
	}
}

// give hands on what was seen.
func (m *Monitor) give(ctx context.Context, in input) bool {
	select {
	case m.in <- in:
		return true
	case <-ctx.Done():
		return false
	}
}

// Changed is closed once there is something newer to report.
func (m *Monitor) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}

// Version changes whenever a condition or the inventory did.
func (m *Monitor) Version() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.engine.version
}

// Report is how the GPUs are now; nil where there is nothing to report. The
// caller may keep it.
func (m *Monitor) Report(whole bool) *healthv1.HealthReport {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.engine.concerned() {
		return nil
	}
	t := m.now()
	m.number = max(m.number+1, uint64(t.boot.Milliseconds())) // a boot has no negative time
	r := m.engine.report(whole, m.number, t)
	r.KernelLinesLost = m.lost
	return r
}

// lookPatience is how long Look waits for a sample.
const lookPatience = 45 * time.Second

// Look has all values of the GPUs read anew, and returns the conditions that follow,
// by key. While the driver cannot be asked, or does not answer in time, they are
// as they were, and those that were not looked at are stale. The caller may keep
// them.
func (m *Monitor) Look(ctx context.Context) ([]*healthv1.Condition, error) {
	limited, done := context.WithTimeout(ctx, lookPatience)
	defer done()
	begun := m.cfg.Clock.Boot()
	for _, c := range []chan struct{}{m.full, m.kick} {
		select {
		case c <- struct{}{}:
		default:
		}
	}
	for {
		changed := m.Changed()
		list, fresh := m.conditions(begun)
		if fresh {
			return list, nil
		}
		select {
		case <-changed:
		case <-limited.Done():
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			return outdated(list), nil
		}
	}
}

// conditions are those that are, and whether all values were read since a time, or
// are known not to be had.
func (m *Monitor) conditions(since time.Duration) (list []*healthv1.Condition, fresh bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.engine.all() {
		list = append(list, proto.CloneOf(c.now))
	}
	switch m.engine.driver.GetState() {
	case gpuv1.DriverState_DRIVER_STATE_OK, gpuv1.DriverState_DRIVER_STATE_STARTING, gpuv1.DriverState_DRIVER_STATE_QUIESCED,
		gpuv1.DriverState_DRIVER_STATE_NO_ANSWER_YET, gpuv1.DriverState_DRIVER_STATE_UNSPECIFIED:
		return list, m.engine.wholly > since
	default:
		return list, true
	}
}

// outdated says of conditions that they were not looked at.
func outdated(list []*healthv1.Condition) []*healthv1.Condition {
	for _, c := range list {
		if c.GetState() == ok || c.GetState() == unknown {
			c.State, c.Reason, c.Message = stale, "NO_SAMPLE", "the driver did not answer in time; last known: "+word(c.GetState())
		}
	}
	return list
}

// Ready is whether work that needs the GPUs should come; nil where there are
// none.
func (m *Monitor) Ready() *Ready {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.engine.ready()
}

// line hands on what a record of the kernel's log reports, with the time at which
// it was written.
func (m *Monitor) line(ctx context.Context, r kernel.Record, reports []kernel.Report) bool {
	return m.give(ctx, func(e *engine, t moment) bool {
		now := t.boot
		if age := t.boot - r.Boot; age > 0 && r.Boot > 0 {
			t = moment{t.wall.Add(-age), r.Boot}
		}
		return e.takeLine(r.Sequence, reports, t, now)
	})
}
