package main

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

// TestOrphansAreReaped: what a suite's programs leave behind, and has ended, is
// no zombie while the suite goes on.
func TestOrphansAreReaped(t *testing.T) {
	if err := adoptOrphans(); err != nil {
		t.Fatal(err)
	}
	// The shell in the middle ends at once; its child is adopted and ends soon.
	// The outer one lives until it has no sister any more.
	script := `sh -c 'sleep 0.2 & echo $!' > "$1"; p=$(cat "$1")
for i in $(seq 100); do test -e /proc/$p || exit 0; sleep 0.1; done; exit 1`
	cmd := exec.CommandContext(t.Context(), "sh", "-c", script, "sh", t.TempDir()+"/pid")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	done := make(chan struct{})
	go func() { reap(cmd.Process.Pid, ended); close(done) }()
	err := cmd.Wait()
	close(ended)
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Error("the reaper goes on after the end")
	}
	if err != nil {
		t.Errorf("an orphan that had ended was still there after ten seconds: %v", err)
	}
}
