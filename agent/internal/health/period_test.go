package health_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/millwright/agent/internal/gpu"
	"github.com/gpuaas/millwright/agent/internal/health"
	"github.com/gpuaas/millwright/agent/internal/health/xid"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// bubbleClock is the time of a bubble of testing/synctest.
type bubbleClock struct{ begin time.Time }

func (c bubbleClock) Now() time.Time      { return time.Now() }
func (c bubbleClock) Boot() time.Duration { return time.Hour + time.Since(c.begin) }

// bubble is a Monitor and a Supervisor before stand-ins, in faked time.
type bubble struct {
	*health.Monitor
	*machine
	t       *testing.T
	journal *memory
}

// inBubble runs a story with GPUs that were found well, at some time between two
// samples.
func inBubble(t *testing.T, every time.Duration, story func(*bubble)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		quiet, clk := slog.New(slog.DiscardHandler), bubbleClock{time.Now()}
		b := &bubble{t: t, machine: &machine{free: make(chan struct{})}, journal: &memory{}}
		gpus := gpu.New(gpu.Config{Mode: gpu.On, Program: "/stand-in", Logger: quiet, Clock: clk, Sysfs: t.TempDir(), Pause: every, Start: b.start})
		table, err := xid.Builtin()
		if err != nil {
			t.Fatal(err)
		}
		b.Monitor = health.New(health.Config{
			Driver: gpus, Journal: b.journal, Clock: clk, Logger: quiet, BootID: "boot-1", XIDs: table, Period: every, SlowPeriod: 6 * every,
		})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		for _, run := range []func(context.Context) error{gpus.Run, b.Run} {
			running.Go(func() {
				if err := run(ctx); err != nil {
					t.Errorf("run: %v", err)
				}
			})
		}
		defer func() { cancel(); running.Wait() }()
		b.after("all is well", time.Minute, b.well)
		after := time.NewTimer(3*every + every/3)
		<-after.C
		story(b)
	})
}

// after waits until a whole report fits, and returns how long that took.
func (b *bubble) after(what string, most time.Duration, fits func(*healthv1.HealthReport) bool) time.Duration {
	b.t.Helper()
	begin := time.Now()
	limit := time.NewTimer(most)
	defer limit.Stop()
	for {
		changed := b.Changed()
		if r := b.Report(true); r != nil && fits(r) {
			return time.Since(begin)
		}
		select {
		case <-changed:
		case <-limit.C:
			b.t.Fatalf("%s: not within %v: %v", what, most, b.Report(true))
		}
	}
}

func (b *bubble) well(r *healthv1.HealthReport) bool {
	for _, c := range r.GetConditions() {
		if c.GetState() == raised || c.GetState() == stale {
			return false
		}
	}
	ready := b.Ready()
	return ready != nil && ready.State == ok && len(r.GetSample().GetGpus()) == 2
}

// TestWithinOnePeriod has the driver fail in each way, and holds how long it
// takes until the condition says so against the period: what the sampler must
// ask for is met by its next question, at most a period later, and a question
// without an answer is told of half a period after it was asked. What ends the
// program is told at once.
func TestWithinOnePeriod(t *testing.T) {
	const every = 10 * time.Second
	refused := func(s gpuv1.DriverState) damage { return damage{refused: s} }
	for _, tc := range []struct {
		name    string
		damage  damage
		restart bool
		key     string
		words   string
		most    time.Duration // from the damage
		back    time.Duration // from its end
	}{
		{"library missing", refused(gpuv1.DriverState_DRIVER_STATE_LIBRARY_MISSING), true, "node.library_missing", "refuses", every, every},
		{"a base symbol missing", refused(gpuv1.DriverState_DRIVER_STATE_SYMBOL_MISSING), true, "node.symbol_missing", "refuses", every, every},
		{"a symbol missing in a call", damage{undefined: "sample"}, false, "node.symbol_missing", "nvmlDeviceGetName", every, 2 * every},
		{"LD_BIND_NOW", damage{unbound: true}, true, "node.symbol_missing", "LD_BIND_NOW", every, every},
		{"hang in Init", damage{hang: "init"}, true, "node.driver_no_answer", "5s to answer its initialisation", every, time.Minute + every},
		{"hang in the inventory", damage{hang: "inventory"}, true, "node.driver_unresponsive", "the inventory", every, 2 * every},
		{"hang in a sample", damage{hang: "sample"}, false, "node.driver_unresponsive", "a fast sample", every + every/2, 2 * every},
		{"hang in the events", damage{hang: "events"}, false, "node.driver_unresponsive", "events", every + every/2, 2 * every},
		{"crash", damage{crash: "sample"}, false, "node.driver_crashed", "segmentation fault", every, 2 * every},
		{"crash in Init", damage{crash: "init"}, true, "node.driver_crashed", "initialisation", every, every},
		{"GPU lost", damage{lost: true}, false, "gpu.lost/GPU-1", "", every, every},
		{"count drop", damage{absent: true}, false, "node.gpu_count", "missing: GPU-1 (GPU 1 at 0000:c1:00.0)", every, every},
		{"driver and library differ", refused(gpuv1.DriverState_DRIVER_STATE_VERSION_MISMATCH), true, "node.driver_mismatch", "refuses", every, every},
		{"driver not loaded", refused(gpuv1.DriverState_DRIVER_STATE_DRIVER_NOT_LOADED), true, "node.driver_not_loaded", "refuses", every, every},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inBubble(t, every, func(b *bubble) {
				b.set(tc.damage, tc.restart)
				told := func(r *healthv1.HealthReport) bool {
					c := find(r, tc.key)
					return c.GetState() == raised && strings.Contains(c.GetMessage(), tc.words)
				}
				if d := b.after(tc.key, time.Hour, told); d > tc.most {
					t.Errorf("%s is told after %v, at most %v is promised", tc.key, d, tc.most)
				}
				if b.journal.raised(tc.key) == 0 {
					t.Error("it is in the report and in no edge")
				}
				if ready := b.Ready(); ready == nil || ready.State == ok {
					t.Errorf("ready: %v", ready)
				}
				b.set(damage{}, false)
				if d := b.after("well again", time.Hour, b.well); d > tc.back {
					t.Errorf("it is well again after %v, at most %v is promised", d, tc.back)
				}
			})
		})
	}
}

// raised is how often a condition was told as raised.
func (m *memory) raised(key string) (n int) {
	for _, e := range m.all() {
		if c := e.GetCondition(); c.GetKey() == key && c.GetState() == raised {
			n++
		}
	}
	return n
}

// TestNoAnswerYet follows an Init that hangs: it is no answer yet, then the
// driver is unresponsive, and stays so over new starts; and one that only takes
// long leaves nothing behind.
func TestNoAnswerYet(t *testing.T) {
	const every = 10 * time.Second
	is := func(key string, state healthv1.State) func(*healthv1.HealthReport) bool {
		return func(r *healthv1.HealthReport) bool { return find(r, key).GetState() == state }
	}
	inBubble(t, every, func(b *bubble) {
		b.set(damage{hang: "init"}, true)
		b.after("no answer yet", every, is("node.driver_no_answer", raised))
		if s := b.Report(true).GetDriver(); s.GetState() != gpuv1.DriverState_DRIVER_STATE_NO_ANSWER_YET {
			t.Errorf("the driver's state: %v", s)
		}
		b.after("unresponsive", time.Minute, is("node.driver_unresponsive", raised))
		if c := find(b.Report(true), "node.driver_no_answer"); c.GetState() == raised {
			t.Errorf("both are told: %v", c)
		}
		again := time.NewTimer(5 * time.Minute)
		<-again.C
		if n := b.journal.raised("node.driver_unresponsive"); n != 1 || b.journal.raised("node.driver_no_answer") != 1 {
			t.Errorf("over new starts it was told %d times", n)
		}
	})
	inBubble(t, every, func(b *bubble) {
		b.set(damage{hang: "init"}, true)
		b.after("no answer yet", every, is("node.driver_no_answer", raised))
		b.set(damage{}, false)
		close(b.free)
		if d := b.after("well again", time.Minute, b.well); d > time.Second {
			t.Errorf("an answer that came late counts only after %v", d)
		}
		if b.journal.raised("node.driver_unresponsive") != 0 {
			t.Error("a driver that was only slow was told of as unresponsive")
		}
	})
}
