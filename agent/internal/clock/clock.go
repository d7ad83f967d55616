// Package clock is the agent's time. Durations are measured by CLOCK_BOOTTIME,
// which goes on during suspend and is not stepped. What was signed with a
// window, and certificates, are judged by [HighWater], which does not follow
// the wall clock back.
package clock

import (
	"context"
	"time"

	"golang.org/x/sys/unix"
)

// Clock tells the time. Implementations are safe for concurrent use.
type Clock interface {
	// Now is the wall clock.
	Now() time.Time
	// Boot is CLOCK_BOOTTIME: the time since the kernel started, suspend
	// included.
	Boot() time.Duration
}

// System is the clock of the machine. A build with the tag millwright_crash
// adds the offsets of a file, so that a test can set one process's clock.
type System struct{}

// Now is time.Now without its monotonic part, so that it compares by the wall.
func (System) Now() time.Time {
	wall, _ := offsets()
	return time.Now().Round(0).Add(wall)
}

// Boot reads CLOCK_BOOTTIME.
func (System) Boot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("clock: CLOCK_BOOTTIME: " + err.Error()) // no kernel since 2.6.39 lacks it
	}
	_, boot := offsets()
	return time.Duration(ts.Nano()) + boot
}

// LookAgain is how often a wait looks at CLOCK_BOOTTIME: the timers of Go stand
// still while the machine is suspended.
const LookAgain = 10 * time.Second

// Sleep waits for d, suspend included: it returns at most [LookAgain] after the
// machine is up again. It returns false, at once, when ctx ends before.
func Sleep(ctx context.Context, d time.Duration) bool {
	return sleep(ctx, System{}, d, nil)
}

// Wait is [Sleep] that ends early once early is closed or holds a token.
func Wait(ctx context.Context, d time.Duration, early <-chan struct{}) bool {
	return sleep(ctx, System{}, d, early)
}

// sleep ends by the clock that is first: the timers of a test that fakes them
// run ahead of the kernel's.
func sleep(ctx context.Context, c Clock, d time.Duration, early <-chan struct{}) bool {
	boot, begun := c.Boot(), time.Now()
	timer := time.NewTimer(min(d, LookAgain))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-early:
			return true
		case <-timer.C:
		}
		left := d - max(c.Boot()-boot, time.Since(begun))
		if left <= 0 {
			return true
		}
		timer.Reset(min(left, LookAgain))
	}
}

// Synchronised reports whether the kernel says that something keeps the wall
// clock right. It is only ever a reason to believe the clock: on many machines
// nothing tells the kernel.
func (System) Synchronised() bool {
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	wall, _ := offsets()
	return err == nil && state != unix.TIME_ERROR && t.Status&unix.STA_UNSYNC == 0 && wall == 0
}
