// Package clock is the server's time: the wall clock for what has a date, and
// CLOCK_BOOTTIME for how long something lasted.
package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now is the wall clock, without its monotonic part, so that it compares by the
// wall. A build with the tag millwright_crash adds the offset of a file.
func Now() time.Time {
	wall, _ := offsets()
	return time.Now().Round(0).Add(wall)
}

// Boot returns a clock of CLOCK_BOOTTIME: the time since the kernel started,
// suspend included. Where the timers of a test run ahead of the kernel it goes
// with them.
func Boot() func() time.Duration {
	first, begun := boot(), time.Now()
	return func() time.Duration { return first + max(boot()-first, time.Since(begun)) }
}

func boot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("clock: CLOCK_BOOTTIME: " + err.Error()) // no kernel since 2.6.39 lacks it
	}
	_, ahead := offsets()
	return time.Duration(ts.Nano()) + ahead
}
