package clock

import (
	"fmt"
	"sync"
	"time"
)

const (
	// Agreed is how far apart two clocks may be that agree.
	Agreed = 5 * time.Minute
	// Ahead is how far beyond what is sure the wall clock is believed without
	// the server's agreement.
	Ahead = 24 * time.Hour
	// wordLasts is how long the server's word counts without a new one.
	wordLasts = 24 * time.Hour
)

// HighWater is a [Clock] whose Now does not go back: it is the later of the
// wall clock and the highest one that was believed, which outlives restarts. It
// says too whether the wall clock can be believed. It is safe for concurrent
// use.
type HighWater struct {
	clock  Clock
	synced func() bool

	mu     sync.Mutex
	high   time.Time     // the highest wall clock that was believed; guarded by mu
	sure   time.Time     // what was sure at sureAt: confirmed, and counted on since; guarded by mu
	sureAt time.Duration // by Boot; guarded by mu
	word   time.Time     // what the server's clock showed at wordAt; zero: nothing heard; guarded by mu
	wordAt time.Duration // by Boot; guarded by mu
}

// NewHighWater returns a high water that knows nothing yet. synced says whether
// the kernel knows its clock to be right.
func NewHighWater(c Clock, synced func() bool) *HighWater {
	return &HighWater{clock: c, synced: synced, sureAt: c.Boot()}
}

// Load takes what was kept: the high water and the time that was sure. It only
// raises.
func (h *HighWater) Load(high, sure time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	boot := h.clock.Boot()
	if high.After(h.high) {
		h.high = high
	}
	if sure.After(h.sureNow(boot)) {
		h.sure, h.sureAt = sure, boot
	}
}

// Boot is CLOCK_BOOTTIME.
func (h *HighWater) Boot() time.Duration { return h.clock.Boot() }

// Now is the time by which windows and certificates are judged: the wall clock,
// or the high water where that is later.
func (h *HighWater) Now() time.Time {
	wall := h.clock.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	boot := h.clock.Boot()
	h.observe(wall, boot)
	if known := h.latest(boot); known.After(wall) {
		return known
	}
	return wall
}

// Believed is the high water alone. Nothing that was forgotten or deleted by it
// was forgotten because a clock ran ahead.
func (h *HighWater) Believed() time.Time {
	high, _ := h.Kept()
	return high
}

// Steady is a clock whose Now is [HighWater.Believed]. Ages that end in a
// deletion are counted by it, and times that one node compares with each other.
func (h *HighWater) Steady() Clock { return steady{h} }

type steady struct{ *HighWater }

// Now is the high water alone.
func (s steady) Now() time.Time { return s.Believed() }

// Kept returns what is to be kept over a restart; see [HighWater.Load].
func (h *HighWater) Kept() (high, sure time.Time) {
	wall := h.clock.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	boot := h.clock.Boot()
	h.observe(wall, boot)
	return h.latest(boot), h.sureNow(boot)
}

// ServerTime takes the server's word of what time it is now. It raises nothing
// by itself: it only confirms the wall clock.
func (h *HighWater) ServerTime(server time.Time) {
	wall := h.clock.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.word, h.wordAt = server, h.clock.Boot()
	h.observe(wall, h.wordAt)
}

// Reset makes the wall clock the high water, whatever it was before, by root's
// word. It returns both.
func (h *HighWater) Reset() (before, now time.Time) {
	wall := h.clock.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	before = h.high
	h.high, h.sure, h.sureAt = wall, wall, h.clock.Boot()
	h.word = time.Time{}
	return before, wall
}

// Doubt says why the wall clock is not believed, with the way out, or nil. The
// kernel's own doubt alone is none; its confidence ends every other.
func (h *HighWater) Doubt() error {
	wall := h.clock.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	boot := h.clock.Boot()
	h.observe(wall, boot)
	if h.synced() {
		return nil
	}
	server, heard := h.wordNow(boot)
	switch {
	case h.latest(boot).Sub(wall) > Agreed:
		return fmt.Errorf("the node's clock shows %s, and it is %s at least by what it has shown before: set the clock; if it is right now, run millwrightd clock reset as root on the node",
			stamp(wall), stamp(h.latest(boot)))
	case heard && !agree(wall, server):
		return fmt.Errorf("the node's clock shows %s, and the server's %s: set the clock that is wrong", stamp(wall), stamp(server))
	case !heard && wall.Sub(h.sureNow(boot)) > Ahead && !h.sure.IsZero():
		return fmt.Errorf("the node's clock shows %s, which is more than %s ahead of what it can be sure of (%s), and no server was heard that agrees: set the clock; if it is right, run millwrightd clock reset as root on the node",
			stamp(wall), Ahead, stamp(h.sureNow(boot)))
	}
	return nil
}

// observe raises the high water to the wall clock where that can be believed.
func (h *HighWater) observe(wall time.Time, boot time.Duration) {
	server, heard := h.wordNow(boot)
	switch {
	case heard && agree(wall, server):
		h.sure, h.sureAt = wall, boot
	case heard:
		return
	case !h.sure.IsZero() && wall.Sub(h.sureNow(boot)) > Ahead:
		return
	}
	if wall.After(h.high) {
		h.high = wall
	}
}

// latest is the high water, or what is sure where that is later: it goes on
// while the wall clock is wrong.
func (h *HighWater) latest(boot time.Duration) time.Time {
	if sure := h.sureNow(boot); sure.After(h.high) {
		return sure
	}
	return h.high
}

func (h *HighWater) sureNow(boot time.Duration) time.Time {
	if h.sure.IsZero() {
		return h.sure
	}
	return h.sure.Add(max(boot-h.sureAt, 0))
}

func (h *HighWater) wordNow(boot time.Duration) (time.Time, bool) {
	age := boot - h.wordAt
	if h.word.IsZero() || age > wordLasts {
		return time.Time{}, false
	}
	return h.word.Add(max(age, 0)), true
}

func agree(a, b time.Time) bool { return a.Sub(b).Abs() <= Agreed }

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
