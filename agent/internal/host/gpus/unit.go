package gpus

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/agent/internal/shim"
	"github.com/gpuaas/millwright/tasks/host"
)

// Changer runs programs that change GPUs, one at a time.
type Changer interface {
	// Idle waits until no earlier change runs any more. When the kernel holds the
	// process of one, the error wraps host.ErrGPUUnresponsive.
	Idle(ctx context.Context) error
	// Change runs a program to its end, for at most so long, and returns what it
	// wrote. The error is set when it did not exit with 0. When ctx ends it runs on.
	Change(ctx context.Context, what string, argv, environment []string, limit time.Duration) ([]byte, error)
	// Mark has Idle wait for another unit too, also in a later life of the agent,
	// until another is marked, or none: "".
	Mark(unit string) error
}

// Units is the part of systemd that is needed for changes.
type Units interface {
	Unit(ctx context.Context, name string) (host.UnitStatus, error)
	RunTransient(ctx context.Context, name string, properties []sd.Property) error
	ResetFailed(ctx context.Context, name string)
}

const (
	changeUnit = "millwright-gpu-change.service"
	// endPause is how often it is asked whether a change has ended.
	endPause = 200 * time.Millisecond
	// killTimeout is how long systemd waits for what it has killed.
	killTimeout = 5 * time.Second
)

// InUnits returns a Changer that runs each program in a unit, and has its
// answers in files below dir, which it makes.
func InUnits(u Units, dir string) Changer {
	return inUnits{u, dir, "/sys/fs/cgroup/millwright.slice"}
}

type inUnits struct {
	units Units
	dir   string
	slice string // the control group of the slice
}

// marked is the file that has the name of another unit to wait for.
const marked = "marked"

// Mark implements [Changer].
func (c inUnits) Mark(unit string) error {
	path := filepath.Join(c.dir, marked)
	if unit == "" {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	// Half a name, or none, is left by a power cut alone, which takes the unit too.
	return os.WriteFile(path, []byte(unit), 0o600)
}

// Idle implements [Changer].
func (c inUnits) Idle(ctx context.Context) error {
	b, err := os.ReadFile(filepath.Join(c.dir, marked))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, unit := range append([]string{changeUnit}, strings.Fields(string(b))...) {
		if err := c.ended(ctx, unit); err != nil {
			return err
		}
	}
	return nil
}

// ended waits until a unit has ended.
func (c inUnits) ended(ctx context.Context, unit string) error {
	for {
		u, err := c.units.Unit(ctx, unit)
		if err != nil {
			return err
		}
		if !systemd.Running(u) {
			return c.left(unit)
		}
		if !clock.Sleep(ctx, endPause) {
			return fmt.Errorf("wait for %s: %w", unit, context.Cause(ctx))
		}
	}
}

// left says whether a process outlived its unit, as one does that the kernel
// does not let go: systemd starts the unit again beside it.
func (c inUnits) left(unit string) error {
	b, err := os.ReadFile(filepath.Join(c.slice, unit, "cgroup.procs"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if pids := strings.Fields(string(b)); err == nil && len(pids) > 0 {
		return fmt.Errorf("process %s of an earlier change was killed and the kernel holds it: %w", strings.Join(pids, ", "), host.ErrGPUUnresponsive)
	}
	return err
}

// Change implements [Changer].
func (c inUnits) Change(ctx context.Context, what string, argv, environment []string, limit time.Duration) ([]byte, error) {
	property := func(name string, value any) sd.Property {
		return sd.Property{Name: name, Value: dbus.MakeVariant(value)}
	}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, err
	}
	reply := filepath.Join(c.dir, "reply")
	if err := os.Remove(reply); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	c.units.ResetFailed(ctx, changeUnit) // of an agent that ended before it did
	err := c.units.RunTransient(ctx, changeUnit, []sd.Property{
		sd.PropDescription("Millwright: " + what),
		sd.PropSlice("millwright.slice"),
		sd.PropType("oneshot"),
		systemd.ExecStart(argv),
		property("Environment", append([]string{"PATH=" + shim.Path, "LC_ALL=C"}, environment...)),
		property("StandardInput", "null"),
		property("StandardOutputFile", reply),
		property("TimeoutStartUSec", uint64(limit.Microseconds())),
		property("TimeoutStopUSec", uint64(killTimeout.Microseconds())),
		property("KillSignal", int32(9)),
		property("LimitCORE", uint64(0)),
	})
	if err != nil {
		c.units.ResetFailed(context.WithoutCancel(ctx), changeUnit) // its log is kept
	}
	wrote, missing := os.ReadFile(reply)
	if err == nil && missing != nil {
		err = missing
	}
	return wrote, err
}
