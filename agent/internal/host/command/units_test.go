package command_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	sd "github.com/coreos/go-systemd/v22/dbus"

	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/tasks/host"
)

// units starts shims as processes of the test, for want of a systemd: the shim,
// its files and its signals are the real ones.
type units struct {
	t    *testing.T
	exe  string
	fail func(verb string) error // asked before each call; may be nil

	mu      sync.Mutex
	running map[string]*exec.Cmd
	done    map[string]chan struct{}
	starts  int
	asked   chan struct{} // gets a token when a state was asked for; may be nil
	env     []string      // of the shims

	invocation string // what a running unit says; empty: nothing
}

func newUnits(t *testing.T) *units {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	u := &units{t: t, exe: exe, running: map[string]*exec.Cmd{}, done: map[string]chan struct{}{}}
	t.Cleanup(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		for _, c := range u.running {
			_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // it may have ended
		}
	})
	return u
}

func (u *units) failing(verb string) error {
	if u.fail == nil {
		return nil
	}
	return u.fail(verb)
}

func (u *units) Unit(_ context.Context, name string) (host.UnitStatus, error) {
	if err := u.failing("unit"); err != nil {
		return host.UnitStatus{}, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	select {
	case u.asked <- struct{}{}:
	default:
	}
	if u.running[name] != nil {
		return host.UnitStatus{Load: "loaded", Active: "active", Invocation: u.invocation}, nil
	}
	return host.UnitStatus{Load: "not-found", Active: "inactive"}, nil
}

func (u *units) StartTransient(_ context.Context, name string, properties []sd.Property) error {
	if err := u.failing("start"); err != nil {
		return err
	}
	if !slices.ContainsFunc(properties, func(p sd.Property) bool { return p.Name == "ExecStopPost" }) {
		u.t.Error("nothing records the death of the shim")
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.running[name] != nil {
		return systemd.ErrUnitExists
	}
	return u.spawn(name, dirOf(properties))
}

// dirOf finds the command's directory in the line of ExecStart.
func dirOf(properties []sd.Property) string {
	for _, p := range properties {
		if p.Name == "ExecStart" {
			text := p.Value.String()
			_, rest, _ := strings.Cut(text, `"shim", "`)
			dir, _, _ := strings.Cut(rest, `"`)
			return dir
		}
	}
	return ""
}

func (u *units) spawn(name, dir string) error {
	u.starts++
	// A unit lives on when the one who started it has gone.
	c := exec.CommandContext(context.WithoutCancel(u.t.Context()), u.exe, "shim", dir)
	c.Env = append([]string{fmt.Sprintf("INVOCATION_ID=%032x", u.starts)}, u.env...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	u.running[name], u.done[name] = c, ended
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = c.Wait() // the files tell
		u.mu.Lock()
		delete(u.running, name)
		u.mu.Unlock()
		close(ended)
	})
	u.t.Cleanup(wg.Wait)
	return nil
}

func (u *units) StopUnit(_ context.Context, name string) error {
	if err := u.failing("stop"); err != nil {
		return err
	}
	u.mu.Lock()
	c, ended := u.running[name], u.done[name]
	u.mu.Unlock()
	if c == nil {
		return nil
	}
	_ = c.Process.Signal(syscall.SIGTERM) // it may have ended
	<-ended
	return nil
}

func (*units) ResetFailed(context.Context, string) {}

// kill kills the shim, as want of memory would.
func (u *units) kill(name string) {
	u.mu.Lock()
	c, ended := u.running[name], u.done[name]
	u.mu.Unlock()
	_ = c.Process.Kill() // it may have ended
	<-ended
}
