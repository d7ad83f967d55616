// Package clock is the agent's time. Durations are measured by CLOCK_BOOTTIME,
// which goes on during suspend and is not stepped; windows are judged by the
// wall clock.
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

// System is the clock of the machine.
type System struct{}

// Now is time.Now without its monotonic part, so that it compares by the wall.
func (System) Now() time.Time { return time.Now().Round(0) }

// Boot reads CLOCK_BOOTTIME.
func (System) Boot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("clock: CLOCK_BOOTTIME: " + err.Error()) // no kernel since 2.6.39 lacks it
	}
	return time.Duration(ts.Nano())
}

// Sleep waits for d, by the monotonic clock. It returns false, at once, when ctx
// ends before.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
