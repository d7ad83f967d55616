package disks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	busyTries = 20
	busyPause = 100 * time.Millisecond
)

// errType is returned for a file system that is not made here.
var errType = errors.New("no such file system type")

// WipeDisk implements host.DiskWriter. The disk must not be in use: the kernel
// itself is asked, and wipefs asks it once more. Partitions go from the kernel's
// list with their table.
func (d *Set) WipeDisk(ctx context.Context, name string) error {
	if err := d.exclusive(ctx, name); err != nil {
		return fmt.Errorf("wipe /dev/%s: %w", name, err)
	}
	crash.Point("host.disk.wipe.before")
	if err := d.change(ctx, "wipe", name, makeTimeout, "wipefs", "--all", "--quiet", d.dev(name)); err != nil {
		return err
	}
	if err := d.settle(name); err != nil {
		return fmt.Errorf("wipe /dev/%s: %w", name, err)
	}
	crash.Point("host.disk.wipe.after")
	return nil
}

// MakeFilesystem implements host.DiskWriter.
func (d *Set) MakeFilesystem(ctx context.Context, name string, f host.Filesystem) error {
	argv := map[string][]string{
		"xfs":  {"mkfs.xfs", "-f", "-q", "-m", "uuid=" + f.UUID, "-L", f.Label},
		"ext4": {"mkfs.ext4", "-q", "-m", "0", "-U", f.UUID, "-L", f.Label},
	}[f.Type]
	if argv == nil {
		return fmt.Errorf("make %s on /dev/%s: %w", f.Type, name, errType)
	}
	if err := d.exclusive(ctx, name); err != nil {
		return fmt.Errorf("make %s on /dev/%s: %w", f.Type, name, err)
	}
	crash.Point("host.disk.make.before")
	if err := d.change(ctx, "make "+f.Type+" on", name, makeTimeout, append(argv, d.dev(name))...); err != nil {
		return err
	}
	if err := d.settle(name); err != nil {
		return fmt.Errorf("make %s on /dev/%s: %w", f.Type, name, err)
	}
	crash.Point("host.disk.make.after")
	return nil
}

// exclusive asks the kernel for the disk alone: it says no while a mount, a
// holder or swap has the disk, whatever any table says. A program of an agent
// that was killed may still be at it, so it is asked for a while.
func (d *Set) exclusive(ctx context.Context, name string) error {
	if err := d.cfg.Changes.Idle(ctx, name); err != nil {
		return err
	}
	for range busyTries {
		err := d.alone(name)
		if !errors.Is(err, host.ErrBusy) {
			return err
		}
		if !clock.Sleep(ctx, busyPause) {
			return context.Cause(ctx)
		}
	}
	return d.alone(name)
}

func (d *Set) alone(name string) error {
	fd, err := unix.Open(d.dev(name), unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.EBUSY) {
		return host.ErrBusy
	}
	if err != nil {
		return fmt.Errorf("open it alone: %w", err)
	}
	return unix.Close(fd)
}

// settle makes what a program wrote durable.
func (d *Set) settle(name string) error {
	f, err := os.OpenFile(d.dev(name), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// run runs a program that reads a disk, which is its last argument.
func (d *Set) run(ctx context.Context, what, name string, timeout time.Duration, argv ...string) ([]byte, error) {
	dev := d.dev(name)
	program, err := d.cfg.Find(ctx, argv[0])
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", what, dev, err)
	}
	res, err := d.cfg.Children.Run(ctx, child.Spec{
		Argv: append(append([]string{program}, argv[1:]...), dev), Timeout: timeout, Key: "disk " + name,
	})
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", what, dev, err)
	}
	if res.ExitCode != 0 {
		return nil, fmt.Errorf("%s %s: %s ended with %d: %.300s: %w", what, dev, argv[0], res.ExitCode,
			strings.Join(strings.Fields(string(res.Stderr)), " "), errProgram)
	}
	return res.Stdout, nil
}

// change runs a program that changes a disk or an array.
func (d *Set) change(ctx context.Context, what, name string, timeout time.Duration, argv ...string) error {
	program, err := d.cfg.Find(ctx, argv[0])
	if err == nil {
		err = d.cfg.Changes.Change(ctx, name, append([]string{program}, argv[1:]...), timeout)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", what, d.dev(name), err)
	}
	return nil
}

// errProgram is wrapped by the error of a program that says that it did not do
// its work.
var errProgram = errors.New("the program reports an error")
