package harness

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Clock is the wall clock of a whole cluster. It may be set forward.
type Clock struct{ ahead atomic.Int64 }

// Now is the wall clock.
func (c *Clock) Now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())).Round(0) }

// Boot is CLOCK_BOOTTIME.
func (*Clock) Boot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("harness: CLOCK_BOOTTIME: " + err.Error())
	}
	return time.Duration(ts.Nano())
}

// Pass sets the clock forward.
func (c *Clock) Pass(d time.Duration) { c.ahead.Add(int64(d)) }

// Pass lets time pass for the server and all nodes, by their wall clocks.
func (c *Cluster) Pass(d time.Duration) { c.clock.Pass(d) }
