package systemd

import (
	"context"
	"errors"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/tasks/host"
)

// RunTransient runs a transient unit of type oneshot to its end. The error wraps
// host.ErrJob and has the last log lines when its program did not exit with 0,
// and [ErrUnitExists] when a unit of that name is there already. When ctx ends
// the unit runs on.
func (c *Conn) RunTransient(ctx context.Context, name string, properties []sd.Property) error {
	begin := clock.System{}.Now() // by the clock of the journal
	err := c.StartTransient(ctx, name, properties)
	if err != nil && !errors.Is(err, host.ErrJob) {
		return err
	}
	u, err2 := c.unit(ctx, name)
	if err2 != nil {
		return errors.Join(err, err2)
	}
	if err == nil && u.Active != "failed" {
		return nil
	}
	return c.jobError(ctx, begin, "run", name, "", u)
}

// execLine is one line of an Exec property, as the bus has it.
type execLine struct {
	Path          string
	Args          []string
	IgnoreFailure bool
}

// ExecStart returns the property of a unit that runs one command after the other,
// each as long as none has failed. The first word of a command is its program's
// path. Only a oneshot has more than one.
func ExecStart(commands ...[]string) sd.Property {
	lines := make([]execLine, len(commands))
	for i, argv := range commands {
		lines[i] = execLine{Path: argv[0], Args: argv}
	}
	return sd.Property{Name: "ExecStart", Value: dbus.MakeVariant(lines)}
}
