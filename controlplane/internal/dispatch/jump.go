package dispatch

import (
	"context"
	"log/slog"
	"time"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	// jumpOf is how far the wall clock must run ahead of CLOCK_BOOTTIME to be
	// taken for a jump, and how far apart two clocks are that disagree.
	jumpOf = 5 * time.Minute
	// gapOf is how far it may be ahead of the log when the server starts.
	gapOf = 24 * time.Hour
	// holdFor is how long, by CLOCK_BOOTTIME, nothing expires after a jump that
	// nobody confirms.
	holdFor = 24 * time.Hour
)

// jump watches for a wall clock that has run ahead. Then no task expires, since
// that could not be taken back, until the clock is where it was, the nodes'
// clocks agree with it, or a day has passed. Nothing is lost by it: a node
// starts no task whose window has passed. It belongs to the sweep.
type jump struct {
	log    *slog.Logger
	now    time.Time     // what the wall clock should have shown at boot
	boot   time.Duration // by CLOCK_BOOTTIME
	held   bool
	heldAt time.Duration
}

// begin compares the wall clock with the last entry of the log.
func (j *jump) begin(now, last time.Time, boot time.Duration) {
	j.now, j.boot = now, boot
	if !last.IsZero() && now.Sub(last) > gapOf {
		j.now = last
		j.hold(now, boot)
	}
}

// held reports whether nothing may expire now. agree says how many nodes were
// heard since a moment whose clocks agree with the server's, and how many whose
// do not.
func (j *jump) holds(now time.Time, boot time.Duration, agree func(since time.Duration) (yes, no int)) bool {
	should := j.now.Add(max(boot-j.boot, 0))
	off := now.Sub(should)
	if !j.held && off > jumpOf {
		j.now, j.boot = should, boot
		j.hold(now, boot)
	}
	if !j.held {
		j.now, j.boot = now, boot
		return false
	}
	yes, no := agree(j.heldAt)
	switch {
	case off <= jumpOf:
		j.release("the clock is where it was", now, boot)
	case yes > no:
		j.release("the nodes' clocks agree", now, boot)
	case boot-j.heldAt > holdFor:
		j.release("a day has passed", now, boot)
	}
	return j.held
}

func (j *jump) hold(now time.Time, boot time.Duration) {
	j.held, j.heldAt = true, boot
	j.log.Error("the server's clock has jumped: no task expires until it is set right, the nodes' clocks agree with it, or a day has passed",
		"shows", now, "expected", j.now)
}

func (j *jump) release(why string, now time.Time, boot time.Duration) {
	j.held, j.now, j.boot = false, now, boot
	j.log.Warn("tasks expire again", "why", why)
}

// agree counts the nodes whose clocks were heard since a moment.
func (d *Dispatcher) agree(since time.Duration) (yes, no int) {
	for _, s := range d.all() {
		s.mu.Lock()
		heard, offset := s.offsetAt, s.contact.ClockOffset
		s.mu.Unlock()
		switch {
		case heard <= since:
		case offset.Abs() <= jumpOf:
			yes++
		default:
			no++
		}
	}
	return yes, no
}

// lastEntry is the time of the newest entry of the log, zero when there is none
// or it cannot be read.
func (d *Dispatcher) lastEntry(ctx context.Context) (last time.Time) {
	err := d.cfg.Reader.View(ctx, func(v store.View) error {
		entries, err := v.Entries(v.LastIndex(), 1, 1<<20)
		for _, e := range entries {
			m, err := e.Decode()
			if err != nil {
				return err
			}
			last = m.GetRecordTime().AsTime()
		}
		return err
	})
	if err != nil && ctx.Err() == nil {
		d.cfg.Logger.Error("newest entry of the log not read", "err", err)
	}
	return last
}
