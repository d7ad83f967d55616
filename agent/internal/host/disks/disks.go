// Package disks knows the node's disks: what the kernel says of them, what they
// are seen to hold, and how that is changed. All that does I/O to a disk runs in
// a child process with a deadline.
package disks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	readTimeout = 20 * time.Second
	// makeTimeout is less than that of the step.
	makeTimeout = 4 * time.Minute
	// sectorSize is the unit of the kernel's sizes, whatever the disk's is.
	sectorSize = 512
)

// Config says how to look and where.
type Config struct {
	// Children runs the programs that read.
	Children *child.Runner
	// Changes runs the programs that change.
	Changes Changer
	// Find returns the path of a program.
	Find func(ctx context.Context, name string) (string, error)
	// Sys, Proc and Dev are those file systems; unset: /sys, /proc and /dev.
	Sys, Proc, Dev string
}

// Set implements host.DiskReader, host.DiskWriter and host.ArrayWriter. It is safe for
// concurrent use.
type Set struct{ cfg Config }

// New returns the disks of the machine.
func New(cfg Config) *Set {
	for p, unset := range map[*string]string{&cfg.Sys: "/sys", &cfg.Proc: "/proc", &cfg.Dev: "/dev"} {
		if *p == "" {
			*p = unset
		}
	}
	return &Set{cfg: cfg}
}

// Disks implements host.DiskReader. A device without a size, such as a loop
// device without a file, is none.
func (d *Set) Disks(ctx context.Context) ([]host.Disk, error) {
	entries, err := os.ReadDir(filepath.Join(d.cfg.Sys, "block"))
	if err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	swaps, err := d.swaps()
	if err != nil {
		return nil, err
	}
	var out []host.Disk
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("list disks: %w", err)
		}
		disk, err := d.disk(e.Name(), swaps)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it went while it was looked at
		}
		if err != nil {
			return nil, fmt.Errorf("look at disk %s: %w", e.Name(), err)
		}
		if disk.SizeBytes > 0 || disk.Array != nil {
			out = append(out, disk)
		}
	}
	return out, nil
}

func (d *Set) disk(name string, swaps []string) (host.Disk, error) {
	dir := filepath.Join(d.cfg.Sys, "block", name)
	out := host.Disk{Name: name}
	var err error
	if out.Dev, err = line(dir, "dev"); err != nil {
		return out, err
	}
	size, err := line(dir, "size")
	if err != nil {
		return out, err
	}
	sectors, err := strconv.ParseUint(size, 10, 54)
	if err != nil {
		return out, fmt.Errorf("size %q: %w", size, err)
	}
	readOnly, err := line(dir, "ro")
	if err != nil {
		return out, err
	}
	out.SizeBytes, out.ReadOnly = sectors*sectorSize, readOnly != "0"
	out.Serial = serial(dir)
	if file, err := line(dir, "loop/backing_file"); err == nil {
		out.File = file
	}
	if out.Holders, err = names(filepath.Join(dir, "holders")); err != nil {
		return out, err
	}
	out.Swap = slices.Contains(swaps, filepath.Join(d.cfg.Dev, name))
	if out.Array, err = array(dir); err != nil {
		return out, err
	}
	return out, d.partitions(dir, swaps, &out)
}

// array returns what the kernel says of an array, nil for any other disk. One
// that is stopped has no members and is none. The states are those of the
// kernel's admin-guide/md.
func array(dir string) (*host.DiskArray, error) {
	state, err := line(dir, "md/array_state")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	a := &host.DiskArray{Active: !slices.Contains([]string{"clear", "inactive", "broken", "suspended"}, state)}
	if a.Members, err = names(filepath.Join(dir, "slaves")); err != nil || len(a.Members) == 0 {
		return nil, err
	}
	a.Level, err = line(dir, "md/level")
	return a, err
}

func (d *Set) partitions(dir string, swaps []string, out *host.Disk) error {
	below, err := names(dir)
	if err != nil {
		return err
	}
	for _, name := range below {
		part := filepath.Join(dir, name)
		if _, err := os.Stat(filepath.Join(part, "partition")); err != nil {
			continue
		}
		dev, err := line(part, "dev")
		if err != nil {
			return err
		}
		holders, err := names(filepath.Join(part, "holders"))
		if err != nil {
			return err
		}
		out.Partitions = append(out.Partitions, host.DiskPartition{Name: name, Dev: dev})
		out.Holders = append(out.Holders, holders...)
		out.Swap = out.Swap || slices.Contains(swaps, filepath.Join(d.cfg.Dev, name))
	}
	return nil
}

// serial returns what a disk tells of itself: NVMe with its controller, virtio
// by itself, SCSI and SATA in page 0x80 of the vital product data, whose text
// begins after four bytes.
func serial(dir string) string {
	for _, file := range []string{"device/serial", "serial"} {
		if s, err := line(dir, file); err == nil && s != "" {
			return s
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, "device/vpd_pg80"))
	if err != nil || len(b) < 5 {
		return ""
	}
	return strings.TrimSpace(strings.Trim(string(b[4:]), "\x00"))
}

// swaps returns the devices that the node swaps to.
func (d *Set) swaps() ([]string, error) {
	b, err := os.ReadFile(filepath.Join(d.cfg.Proc, "swaps"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // a kernel without swap
	}
	if err != nil {
		return nil, fmt.Errorf("list swaps: %w", err)
	}
	var out []string
	for l := range strings.Lines(string(b)) {
		if f := strings.Fields(l); len(f) > 0 && strings.HasPrefix(f[0], "/") {
			out = append(out, f[0])
		}
	}
	return out, nil
}

func line(dir, file string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, file))
	return strings.TrimSpace(string(b)), err
}

func names(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out, err
}

// Signatures implements host.DiskReader with wipefs, which lists all signatures
// where others stop at the first.
func (d *Set) Signatures(ctx context.Context, name string) ([]host.Signature, error) {
	out, err := d.run(ctx, "read signatures of", name, readTimeout, "wipefs", "--json", "--output", "TYPE,UUID,LABEL")
	if err != nil {
		return nil, err
	}
	return parse(out, name)
}

func parse(out []byte, name string) ([]host.Signature, error) {
	var list struct {
		Signatures []struct{ Type, UUID, Label string }
	}
	if len(out) == 0 {
		return nil, nil // an older wipefs says nothing of an empty disk
	}
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, fmt.Errorf("read signatures of /dev/%s: wipefs said %.200q: %w", name, out, err)
	}
	var found []host.Signature
	for _, s := range list.Signatures {
		found = append(found, host.Signature(s))
	}
	return found, nil
}
