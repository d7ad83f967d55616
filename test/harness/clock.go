package harness

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Clock is the clock of a whole cluster. It may be set forward.
type Clock struct {
	ahead  atomic.Int64 // of the machine's wall clock
	booted atomic.Int64 // of the machine's CLOCK_BOOTTIME
}

// Now is the wall clock.
func (c *Clock) Now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())).Round(0) }

// Boot is the time since the boot.
func (c *Clock) Boot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("harness: CLOCK_BOOTTIME: " + err.Error())
	}
	return time.Duration(ts.Nano() + c.booted.Load())
}

// Pass sets the wall clock forward.
func (c *Clock) Pass(d time.Duration) { c.ahead.Add(int64(d)) }

// goOn makes it the time after a cluster was saved, by both clocks.
func (c *Clock) goOn(saved Saved, after time.Duration) {
	c.ahead.Store(int64(time.Until(saved.Time.Add(after))))
	c.booted.Store(0)
	c.booted.Store(int64(saved.Boot + after - c.Boot()))
}

// Pass lets time pass for the server and all nodes, by their wall clocks.
func (c *Cluster) Pass(d time.Duration) { c.clock.Pass(d) }
