//go:build millwright_crash

package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// Point kills the process with SIGKILL when the point is armed.
func Point(name string) {
	if armed(name) {
		die(name)
	}
}

func dir() string { return os.Getenv("MILLWRIGHT_CRASH_DIR") }

func die(name string) {
	_ = os.WriteFile(filepath.Join(dir(), "hit-"+name), nil, 0o600) // the suite misses it
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// armed reports whether the point is armed and this is the time. It takes the
// arming away, so that each strikes once.
func armed(name string) bool {
	if dir() == "" {
		return false
	}
	trace(name)
	all := filepath.Join(dir(), "arm")
	if b, err := os.ReadFile(all); err == nil && string(b) == name {
		_ = os.Remove(all) // or it would strike again
		return true
	}
	own := filepath.Join(dir(), "arm-"+name)
	taken := own + ".taken"
	if os.Rename(own, taken) != nil {
		return false // it is not armed, or another goroutine has it
	}
	var mode string
	var n int
	if b, err := os.ReadFile(taken); err == nil {
		_, _ = fmt.Sscan(string(b), &mode, &n) // what cannot be read strikes at once
	}
	if n <= 1 {
		_ = os.Remove(taken) // or it would strike again
		return true
	}
	_ = os.WriteFile(taken, fmt.Appendf(nil, "%s %d", mode, n-1), 0o600) // the suite misses the hit
	_ = os.Rename(taken, own)                                            // likewise
	return false
}

func trace(name string) {
	f, err := os.OpenFile(filepath.Join(dir(), "trace"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return // nobody asks for it
	}
	_, _ = f.WriteString(name + "\n") // the suite misses it
	_ = f.Close()                     // it was only for the suite
}
