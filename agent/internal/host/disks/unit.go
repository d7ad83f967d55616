package disks

import (
	"context"
	"fmt"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/agent/internal/shim"
	"github.com/gpuaas/millwright/tasks/host"
)

// Changer runs programs that change disks, one at a time for each.
type Changer interface {
	// Idle waits until no earlier change of a disk runs any more.
	Idle(ctx context.Context, device string) error
	// Change runs a program to its end, for at most so long. The error has what it
	// said when it did not end well.
	Change(ctx context.Context, device string, argv []string, limit time.Duration) error
}

// Units is the part of systemd that is needed for changes.
type Units interface {
	Unit(ctx context.Context, name string) (host.UnitStatus, error)
	RunTransient(ctx context.Context, name string, properties []sd.Property) error
	ResetFailed(ctx context.Context, name string)
}

// endPause is how often it is asked whether a change has ended.
const endPause = 200 * time.Millisecond

// InUnits returns a Changer that runs each program in a unit of its own: mkfs.xfs
// sets the block size of the device and mdadm talks to the kernel's md, for which
// both need CAP_SYS_ADMIN, and the agent does not have it. A change goes on when
// the agent ends.
func InUnits(u Units) Changer { return inUnits{u} }

type inUnits struct{ units Units }

func unitOf(device string) string { return "millwright-disk-" + device + ".service" }

// Idle implements [Changer].
func (c inUnits) Idle(ctx context.Context, device string) error {
	for {
		u, err := c.units.Unit(ctx, unitOf(device))
		if err != nil || !systemd.Running(u) {
			return err
		}
		if !clock.Sleep(ctx, endPause) {
			return fmt.Errorf("wait for %s: %w", unitOf(device), context.Cause(ctx))
		}
	}
}

// Change implements [Changer].
func (c inUnits) Change(ctx context.Context, device string, argv []string, limit time.Duration) error {
	name := unitOf(device)
	property := func(name string, value any) sd.Property {
		return sd.Property{Name: name, Value: dbus.MakeVariant(value)}
	}
	c.units.ResetFailed(ctx, name) // of an agent that ended before it did
	err := c.units.RunTransient(ctx, name, []sd.Property{
		sd.PropDescription("Millwright changes disk " + device),
		sd.PropSlice("millwright.slice"),
		sd.PropType("oneshot"),
		systemd.ExecStart(argv),
		property("Environment", []string{"PATH=" + shim.Path, "LC_ALL=C.UTF-8"}),
		property("StandardInput", "null"),
		property("TimeoutStartUSec", uint64(limit.Microseconds())),
		property("LimitCORE", uint64(0)),
	})
	if err != nil {
		c.units.ResetFailed(context.WithoutCancel(ctx), name) // its log is kept
	}
	return err
}
