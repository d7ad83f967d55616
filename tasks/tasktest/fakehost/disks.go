package fakehost

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// byUUID is where udev keeps a link to each file system.
const byUUID = "/dev/disk/by-uuid/"

// errNoDevice is why a mount waits in vain for its device.
var errNoDevice = errors.New("the device does not appear")

// disk is a disk with what it holds.
type disk struct {
	host.Disk
	holds []host.Signature
}

func (n *Node) doDisk(verb string, a []string) error {
	name := a[0]
	if verb == "disk" || verb == "loop" {
		d := disk{Disk: host.Disk{Name: name, Dev: fmt.Sprintf("259:%d", len(n.disks)), SizeBytes: 1 << 40}}
		if verb == "loop" {
			d.File = a[1]
		} else if a[1] != "-" {
			d.Serial = a[1]
		}
		n.disks[name] = d
		return nil
	}
	if verb == "array" {
		n.array(name, a[1], a[2:])
		return nil
	}
	d, ok := n.disks[name]
	if !ok {
		return fmt.Errorf("no disk %s", name)
	}
	switch verb {
	case "blank":
		n.eraseData(d)
		d.holds, d.Partitions = nil, nil
	case "holds":
		s := host.Signature{Type: a[1]}
		if len(a) == 3 {
			s.UUID = a[2]
		}
		d.holds = append(d.holds, s)
	case "partition":
		d.Partitions = append(d.Partitions, host.DiskPartition{Name: a[1], Dev: d.Dev + "1"})
	case "holder":
		d.Holders = append(d.Holders, a[1])
	case "swap":
		d.Swap = true
	case "unassembled":
		n.dissolve(d)
		return nil
	case "renamed":
		delete(n.disks, name)
		name, d.Name = a[1], a[1]
	}
	n.disks[name] = d
	return nil
}

// eraseData forgets the files of the file system on a disk.
func (n *Node) eraseData(d disk) {
	maps.DeleteFunc(n.entries, func(k string, _ entry) bool { return strings.HasPrefix(k, d.Dev+"|") })
}

func (n *Node) diskList() []host.Disk {
	var out []host.Disk
	for _, name := range slices.Sorted(maps.Keys(n.disks)) {
		d := n.disks[name].Disk
		d.Partitions, d.Holders = slices.Clone(d.Partitions), slices.Clone(d.Holders)
		if d.Array != nil {
			d.Array = &host.DiskArray{Level: d.Array.Level, Members: slices.Clone(d.Array.Members), Active: d.Array.Active}
		}
		out = append(out, d)
	}
	return out
}

func (n *Node) signatures(name string) ([]host.Signature, error) {
	d, ok := n.disks[name]
	if !ok {
		return nil, fmt.Errorf("read signatures of /dev/%s: %w", name, fs.ErrNotExist)
	}
	if n.hung[d.Dev] {
		return nil, errHung("read signatures of", "/dev/"+name)
	}
	return slices.Clone(d.holds), nil
}

// exclusive returns a disk that nothing uses.
func (n *Node) exclusive(op, name string) (disk, error) {
	d, ok := n.disks[name]
	if !ok {
		return d, fmt.Errorf("%s /dev/%s: %w", op, name, fs.ErrNotExist)
	}
	used := slices.ContainsFunc(n.mounts, func(m host.Mount) bool { return m.Dev == d.Dev })
	if used || d.Swap || len(d.Holders) > 0 {
		return d, fmt.Errorf("%s /dev/%s: %w", op, name, host.ErrBusy)
	}
	return d, nil
}

func (n *Node) wipeDisk(name string) error {
	d, err := n.exclusive("wipe", name)
	if err != nil {
		return err
	}
	n.eraseData(d)
	d.holds, d.Partitions = nil, nil
	n.disks[name] = d
	return nil
}

func (n *Node) makeFilesystem(name string, f host.Filesystem) error {
	d, err := n.exclusive("make "+f.Type+" on", name)
	if err != nil {
		return err
	}
	if _, err := n.findProgram("mkfs." + f.Type); err != nil {
		return err
	}
	n.eraseData(d)
	d.holds, d.Partitions = []host.Signature{{Type: f.Type, UUID: f.UUID, Label: f.Label}}, nil
	n.disks[name] = d
	return nil
}

// device fills in the mount of the file system on a disk.
func (n *Node) device(m *host.Mount, what, fstype string) error {
	for _, d := range n.disks {
		for _, s := range d.holds {
			if byUUID+s.UUID == what && s.Type == fstype {
				m.Dev, m.FSType, m.Source = d.Dev, fstype, "/dev/"+d.Name
				return nil
			}
		}
	}
	return fmt.Errorf("%s: %w", what, errNoDevice)
}

func (n *Node) dumpDisks() []string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(n.disks)) {
		line := "disk " + name
		for _, s := range n.disks[name].holds {
			line += " " + strings.TrimSpace(s.Type+" "+s.UUID+" "+s.Label)
		}
		for _, p := range n.disks[name].Partitions {
			line += " partition " + p.Name
		}
		lines = append(lines, line)
	}
	return lines
}

func (v *view) Disks(ctx context.Context) ([]host.Disk, error) {
	return call(ctx, v, Op{Name: "Disks"}, func() ([]host.Disk, error) { return v.n.diskList(), nil })
}

func (v *view) Signatures(ctx context.Context, name string) ([]host.Signature, error) {
	return call(ctx, v, Op{Name: "Signatures", Object: name}, func() ([]host.Signature, error) { return v.n.signatures(name) })
}

func (v *view) WipeDisk(ctx context.Context, name string) error {
	return change(ctx, v, "WipeDisk", name, func() error { return v.n.wipeDisk(name) })
}

func (v *view) MakeFilesystem(ctx context.Context, name string, f host.Filesystem) error {
	return change(ctx, v, "MakeFilesystem", name, func() error { return v.n.makeFilesystem(name, f) })
}
