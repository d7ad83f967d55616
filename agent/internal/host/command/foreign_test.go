package command_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/gpuaas/millwright/tasks/host"
)

// A unit that runs under the command's name, and that this agent never started,
// is not taken for its own: nothing is started, stopped or waited for.
func TestForeignUnitIsNotAdopted(t *testing.T) {
	u, state, count := newUnits(t), t.TempDir(), filepath.Join(t.TempDir(), "count")
	c := exec.CommandContext(t.Context(), "/bin/sleep", "1000")
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()         // it was killed
	}()
	u.running[id.Unit()] = c
	_, err := newRunner(u, state).Run(t.Context(), id, sh(`echo x >> "$0"`, count))
	if !errors.Is(err, host.ErrOutcomeUnknown) || u.starts != 0 || exists(count) {
		t.Errorf("%v; %d starts", err, u.starts)
	}
	if err := c.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("what is not ours was stopped: %v", err)
	}
	delete(u.running, id.Unit())
}

// A unit whose invocation is not the one that took the marker is not ours
// either, whoever gave it the name.
func TestForeignInvocationIsNotAdopted(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	if _, err := newRunner(u, state).Run(t.Context(), id, sh("exit 0")); err != nil {
		t.Fatal(err)
	}
	dir, err := id.Dir(state)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(string(dir), "result")); err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), "/bin/sleep", "1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()         // it was killed
	}()
	u.running[id.Unit()], u.invocation = c, "ffffffffffffffffffffffffffffffff"
	if _, err := newRunner(u, state).Run(t.Context(), id, sh("exit 0")); !errors.Is(err, host.ErrOutcomeUnknown) || u.starts != 1 {
		t.Errorf("%v; %d starts", err, u.starts)
	}
	delete(u.running, id.Unit())
}
