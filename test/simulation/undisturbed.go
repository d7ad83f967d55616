package simulation

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
)

// collectEach is how many schedules are played between two collections of
// garbage.
const collectEach = 20

// undisturbed keeps from this process what would choose, by the machine's own
// time, which goroutine runs next. Only one runs at a time; none is made to help
// a collection of garbage, which is left to [collect]; and the runtime's monitor
// sleeps, which else takes the processor from a goroutine that is 20 us in a
// system call or runs for 10 ms, and gives it to the next one. The monitor has no
// switch, but its thread can be given so much slack that its sleep of
// microseconds takes a day. That needs CAP_SYS_NICE: without it an error is
// returned, and on a busy machine a few seeds in a hundred have another history now
// and then.
//
// What must not happen in such a process is that a goroutine waits in a system
// call for another one.
func undisturbed() (restore func(), err error) {
	procs, percent := runtime.GOMAXPROCS(1), debug.SetGCPercent(-1)
	err = monitorSlack("86400000000000")
	return func() {
		runtime.GOMAXPROCS(procs)
		debug.SetGCPercent(percent)
		_ = monitorSlack("0") // the default; it could be set before
	}, err
}

// collect collects garbage, now that nothing of a schedule runs.
func collect(played int) {
	if played%collectEach == collectEach-1 {
		runtime.GC()
	}
}

// monitorSlack sets how much later than asked the thread of the runtime's monitor
// may wake. It is the first thread that a Go process starts, and the directory
// tells them in the order of their start.
func monitorSlack(ns string) error {
	dir, err := os.Open("/proc/self/task")
	if err != nil {
		return fmt.Errorf("find the runtime's monitor: %w", err)
	}
	defer dir.Close() // it was only read
	threads, err := dir.Readdirnames(2)
	if err != nil || len(threads) < 2 {
		return fmt.Errorf("find the runtime's monitor among %q: %w", threads, err)
	}
	if err := os.WriteFile("/proc/"+threads[1]+"/timerslack_ns", []byte(ns), 0); err != nil {
		return fmt.Errorf("let the runtime's monitor sleep: %w", err)
	}
	return nil
}
