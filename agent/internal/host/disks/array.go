package disks

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

// arrayTimeout bounds what is done with an array: it writes a few blocks only.
const arrayTimeout = time.Minute

// MakeArray implements host.ArrayWriter with mdadm. The metadata's place (1.2)
// leaves the first sectors alone; any home host may assemble it, so that a node
// that is renamed keeps its scratch. Mdadm asks no question with --run.
func (d *Set) MakeArray(ctx context.Context, a host.StripedArray) error {
	if err := d.cfg.Changes.Idle(ctx, a.Device); err != nil {
		return err
	}
	for _, name := range a.Disks {
		if err := d.exclusive(ctx, name); err != nil {
			return fmt.Errorf("make array %s of /dev/%s: %w", a.Device, name, err)
		}
	}
	crash.Point("host.array.make.before")
	argv := append([]string{
		"mdadm", "--create", d.dev(a.Device), "--run", "--quiet", "--level=0", "--raid-devices=" + strconv.Itoa(len(a.Disks)),
		"--metadata=1.2", "--homehost=any", "--name=" + a.Device, "--uuid=" + a.UUID,
	}, d.devs(a.Disks)...)
	if err := d.change(ctx, "make array", a.Device, arrayTimeout, argv...); err != nil {
		return err
	}
	// An earlier array of the same disks had its data at the same place.
	if err := d.change(ctx, "wipe", a.Device, makeTimeout, "wipefs", "--all", "--quiet", d.dev(a.Device)); err != nil {
		return err
	}
	if err := d.settleAll(a); err != nil {
		return err
	}
	crash.Point("host.array.make.after")
	return nil
}

// AssembleArray implements host.ArrayWriter with mdadm.
func (d *Set) AssembleArray(ctx context.Context, a host.StripedArray) error {
	if err := d.cfg.Changes.Idle(ctx, a.Device); err != nil {
		return err
	}
	crash.Point("host.array.assemble.before")
	argv := append([]string{"mdadm", "--assemble", d.dev(a.Device), "--run", "--quiet", "--uuid=" + a.UUID}, d.devs(a.Disks)...)
	if err := d.change(ctx, "assemble array", a.Device, arrayTimeout, argv...); err != nil {
		return err
	}
	crash.Point("host.array.assemble.after")
	return nil
}

// StopArray implements host.ArrayWriter with mdadm. The kernel is asked first
// whether it is in use.
func (d *Set) StopArray(ctx context.Context, device string) error {
	if err := d.cfg.Changes.Idle(ctx, device); err != nil {
		return err
	}
	if _, err := os.Stat(d.dev(device)); err == nil {
		if err := d.exclusive(ctx, device); err != nil {
			return fmt.Errorf("stop array %s: %w", device, err)
		}
	}
	crash.Point("host.array.stop.before")
	if err := d.change(ctx, "stop array", device, arrayTimeout, "mdadm", "--stop", "--quiet", d.dev(device)); err != nil {
		return err
	}
	crash.Point("host.array.stop.after")
	return nil
}

func (d *Set) dev(name string) string { return filepath.Join(d.cfg.Dev, name) }

func (d *Set) devs(names []string) []string {
	var out []string
	for _, name := range names {
		out = append(out, d.dev(name))
	}
	return out
}

func (d *Set) settleAll(a host.StripedArray) error {
	for _, name := range append([]string{a.Device}, a.Disks...) {
		if err := d.settle(name); err != nil {
			return fmt.Errorf("make array %s: make /dev/%s durable: %w", a.Device, name, err)
		}
	}
	return nil
}
