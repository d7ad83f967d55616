//go:build millwright_crash

package crash

import (
	"os"
	"path/filepath"
	"syscall"
)

// Point kills the process with SIGKILL when the file MILLWRIGHT_CRASH_DIR/arm
// holds the point's name. It removes the file first, so that each arming kills
// once, and leaves a file hit-NAME as proof.
func Point(name string) {
	dir := os.Getenv("MILLWRIGHT_CRASH_DIR")
	if dir == "" {
		return
	}
	b, err := os.ReadFile(filepath.Join(dir, "arm"))
	if err != nil || string(b) != name {
		return
	}
	_ = os.Remove(filepath.Join(dir, "arm"))
	_ = os.WriteFile(filepath.Join(dir, "hit-"+name), nil, 0o600)
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}
