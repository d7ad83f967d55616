package clock_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/millwright/agent/internal/clock"
)

// hands are a clock whose hands a test moves.
type hands struct {
	now  time.Time
	boot time.Duration
}

func (h *hands) Now() time.Time      { return h.now }
func (h *hands) Boot() time.Duration { return h.boot }

// pass lets time go by, by both clocks.
func (h *hands) pass(d time.Duration) { h.now, h.boot = h.now.Add(d), h.boot+d }

const year = 365 * 24 * time.Hour

var begin = time.Date(2026, time.November, 1, 12, 0, 0, 0, time.UTC)

// TestSteps steps the wall clock in each way, and back to right.
func TestSteps(t *testing.T) {
	for _, tt := range []struct {
		name      string
		step      time.Duration
		connected bool // the server is heard, before and after the step
		doubted   bool // while the clock is wrong
		after     bool // doubted once it is right again
		raised    bool // the high water has followed
	}{
		{name: "right", connected: true},
		{name: "+1h, server says otherwise", step: time.Hour, connected: true, doubted: true},
		{name: "-1h, server says otherwise", step: -time.Hour, connected: true, doubted: true},
		{name: "+10y, server says otherwise", step: 10 * year, connected: true, doubted: true},
		{name: "-10y, server says otherwise", step: -10 * year, connected: true, doubted: true},
		{name: "+2m, server says otherwise", step: 2 * time.Minute, connected: true, raised: true},
		{name: "+1h, alone", step: time.Hour, raised: true, after: true},
		{name: "-1h, alone", step: -time.Hour, doubted: true},
		{name: "-2m, alone", step: -2 * time.Minute},
		{name: "+10y, alone", step: 10 * year, doubted: true},
		{name: "-10y, alone", step: -10 * year, doubted: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := &hands{now: begin, boot: time.Hour}
			right := begin
			w := clock.NewHighWater(h, func() bool { return false })
			w.Load(begin, begin)
			pass := func(d time.Duration) {
				h.pass(d)
				right = right.Add(d)
				if tt.connected {
					w.ServerTime(right)
				}
			}
			pass(time.Minute)
			h.now = h.now.Add(tt.step)
			pass(time.Minute)
			if got := w.Doubt() != nil; got != tt.doubted {
				t.Errorf("wrong by %s: doubt %v", tt.step, w.Doubt())
			}
			if w.Now().Before(right.Add(-time.Minute)) {
				t.Errorf("judged by %s, which is before %s", w.Now(), right)
			}
			if got := w.Believed().After(right.Add(time.Minute)); got != tt.raised {
				t.Errorf("the high water is %s, and it is %s", w.Believed(), right)
			}
			h.now = right
			pass(time.Second)
			if got := w.Doubt() != nil; got != tt.after {
				t.Errorf("right again: doubt %v", w.Doubt())
			}
		})
	}
}

// TestCeiling: alone, the high water rises by a day beyond what is sure and no
// further, however often the agent starts.
func TestCeiling(t *testing.T) {
	h := &hands{now: begin, boot: time.Hour}
	high, sure := begin, begin
	for range 10 {
		w := clock.NewHighWater(h, func() bool { return false })
		w.Load(high, sure)
		h.now = h.now.Add(20 * time.Hour)
		h.boot = time.Minute // it has booted
		high, sure = w.Kept()
	}
	if got := high.Sub(begin); got != 20*time.Hour { // the second step would make it 40
		t.Errorf("it rose by %s without the server", got)
	}
	w := clock.NewHighWater(h, func() bool { return false })
	w.Load(high, sure)
	if err := w.Doubt(); err == nil || !strings.Contains(err.Error(), "clock reset") {
		t.Errorf("doubt %v", err)
	}
	w.ServerTime(h.now.Add(4 * time.Minute))
	if err := w.Doubt(); err != nil || !w.Believed().Equal(h.now) {
		t.Errorf("the server agrees: doubt %v, high water %s", err, w.Believed())
	}
}

// TestServerAloneRaisesNothing: a stolen server cannot push the clock.
func TestServerAloneRaisesNothing(t *testing.T) {
	h := &hands{now: begin, boot: time.Hour}
	w := clock.NewHighWater(h, func() bool { return false })
	w.Load(begin, begin)
	w.ServerTime(begin.Add(10 * year))
	if high, sure := w.Kept(); !high.Equal(begin) || !sure.Equal(begin) {
		t.Errorf("high water %s, sure %s", high, sure)
	}
}

// TestBootWithoutClock starts in 1970 and is set right later.
func TestBootWithoutClock(t *testing.T) {
	h := &hands{now: time.Unix(0, 0), boot: time.Second}
	synced := false
	w := clock.NewHighWater(h, func() bool { return synced })
	w.Load(begin, begin)
	if err := w.Doubt(); err == nil || !strings.Contains(err.Error(), "1970") {
		t.Errorf("doubt %v", err)
	}
	if !w.Now().Equal(begin) {
		t.Errorf("judged by %s: want the high water", w.Now())
	}
	h.now = begin.Add(time.Hour)
	if err := w.Doubt(); err != nil || !w.Now().Equal(h.now) {
		t.Errorf("right now: %v, judged by %s", err, w.Now())
	}
	h.now = time.Unix(0, 0)
	synced = true
	if err := w.Doubt(); err != nil {
		t.Errorf("the kernel is sure of its clock: %v", err)
	}
}

func TestReset(t *testing.T) {
	h := &hands{now: begin.Add(10 * year), boot: time.Hour}
	w := clock.NewHighWater(h, func() bool { return false })
	w.Load(begin, begin)
	w.ServerTime(h.now) // both are wrong
	h.now = begin
	w.ServerTime(begin)
	if w.Doubt() == nil {
		t.Error("ten years back without a doubt")
	}
	before, now := w.Reset()
	if !before.Equal(begin.Add(10*year)) || !now.Equal(begin) || w.Doubt() != nil || !w.Believed().Equal(begin) {
		t.Errorf("reset from %s to %s: doubt %v, high water %s", before, now, w.Doubt(), w.Believed())
	}
}

func TestSuspend(t *testing.T) {
	h := &hands{now: begin, boot: time.Hour}
	w := clock.NewHighWater(h, func() bool { return false })
	w.Load(begin, begin)
	w.ServerTime(begin)
	h.pass(8 * time.Hour)
	if err := w.Doubt(); err != nil || !w.Believed().Equal(h.now) {
		t.Errorf("after 8 hours of suspend: doubt %v, high water %s", err, w.Believed())
	}
}

// sleeper is a clock of which only the boot time counts.
type sleeper struct {
	clock.Clock
	boot atomic.Int64
}

func (s *sleeper) Boot() time.Duration { return time.Duration(s.boot.Load()) }

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, d := range []time.Duration{-time.Second, 0, time.Second, time.Minute, 8 * time.Hour} {
			start := time.Now()
			if !clock.Sleep(t.Context(), d) || time.Since(start) != max(d, 0) {
				t.Errorf("slept %s instead of %s", time.Since(start), d)
			}
		}
		h := new(sleeper)
		start := time.Now()
		woken := make(chan bool, 1)
		time.AfterFunc(0, func() { woken <- clock.SleepBy(t.Context(), h, time.Hour) })
		synctest.Wait()
		h.boot.Store(int64(8 * time.Hour)) // the machine was suspended: its timers stood still
		if !<-woken || time.Since(start) > clock.LookAgain {
			t.Errorf("slept on for %s after the machine was up again", time.Since(start))
		}
		early := make(chan struct{})
		close(early)
		if start = time.Now(); !clock.Wait(t.Context(), time.Hour, early) || time.Since(start) != 0 {
			t.Error("it waited although the end had come")
		}
	})
}
