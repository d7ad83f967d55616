package fakehost

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/gpuaas/millwright/tasks/host"
)

const typeMember = "linux_raid_member"

// array puts an array on disks; with the level "-" one that does not run.
func (n *Node) array(name, level string, members []string) {
	a := &host.DiskArray{Members: slices.Sorted(slices.Values(members)), Active: level != "-"}
	if a.Active {
		a.Level = level
	}
	// Each array has a number of its own, so that files are known by it.
	n.disks[name] = disk{Disk: host.Disk{Name: name, Dev: "9:" + name[len("md"):], SizeBytes: 2 << 40, Array: a}}
	for _, m := range members {
		d := n.disks[m]
		d.Holders = append(slices.Clone(d.Holders), name)
		n.disks[m] = d
	}
}

func (n *Node) makeArray(a host.StripedArray) error {
	if err := n.ready("make array", a); err != nil {
		return err
	}
	for _, name := range a.Disks {
		d := n.disks[name]
		n.eraseData(d)
		d.holds, d.Partitions = []host.Signature{{Type: typeMember, UUID: a.UUID, Label: a.Device}}, nil
		n.disks[name] = d
	}
	delete(n.striped, a.UUID)
	n.array(a.Device, "raid0", a.Disks)
	n.eraseData(n.disks[a.Device])
	return nil
}

func (n *Node) assembleArray(a host.StripedArray) error {
	if err := n.ready("assemble array", a); err != nil {
		return err
	}
	for _, name := range a.Disks {
		if !slices.ContainsFunc(n.disks[name].holds, func(s host.Signature) bool { return s.Type == typeMember && s.UUID == a.UUID }) {
			return fmt.Errorf("assemble array %s: /dev/%s is no member of it", a.Device, name)
		}
	}
	n.array(a.Device, "raid0", a.Disks)
	d := n.disks[a.Device]
	d.holds = n.striped[a.UUID]
	n.disks[a.Device] = d
	return nil
}

// ready reports whether an array can be put on its disks.
func (n *Node) ready(op string, a host.StripedArray) error {
	if _, err := n.findProgram("mdadm"); err != nil {
		return err
	}
	if _, taken := n.disks[a.Device]; taken {
		return fmt.Errorf("%s %s: the name is taken: %w", op, a.Device, host.ErrBusy)
	}
	for _, name := range a.Disks {
		if _, err := n.exclusive(op+" "+a.Device+" of", name); err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) stopArray(name string) error {
	d, err := n.exclusive("stop array", name)
	if err != nil {
		return err
	}
	if _, err := n.findProgram("mdadm"); err != nil {
		return err
	}
	n.dissolve(d)
	return nil
}

// dissolve forgets an array, and remembers what it holds by its members' UUID.
func (n *Node) dissolve(d disk) {
	for _, m := range d.Array.Members {
		member := n.disks[m]
		member.Holders = slices.DeleteFunc(slices.Clone(member.Holders), func(h string) bool { return h == d.Name })
		n.disks[m] = member
		for _, s := range member.holds {
			if s.Type == typeMember && d.Array.Active {
				n.striped[s.UUID] = d.holds
			}
		}
	}
	delete(n.disks, d.Name)
}

// assembleAtBoot is what udev does at a boot: arrays whose disks are all there
// run, those that lack one are begun and stay inactive.
func (n *Node) assembleAtBoot() {
	for _, name := range slices.Sorted(maps.Keys(n.disks)) {
		d := n.disks[name]
		if d.Array == nil {
			continue
		}
		left := slices.DeleteFunc(slices.Clone(d.Array.Members), func(m string) bool { return !isMember(n.disks[m]) })
		if len(left) == len(d.Array.Members) {
			continue
		}
		n.dissolve(d)
		if len(left) > 0 {
			n.array(name, "-", left)
		}
	}
}

func isMember(d disk) bool {
	return slices.ContainsFunc(d.holds, func(s host.Signature) bool { return s.Type == typeMember })
}

func (v *view) MakeArray(ctx context.Context, a host.StripedArray) error {
	return change(ctx, v, "MakeArray", a.Device, func() error { return v.n.makeArray(a) })
}

func (v *view) AssembleArray(ctx context.Context, a host.StripedArray) error {
	return change(ctx, v, "AssembleArray", a.Device, func() error { return v.n.assembleArray(a) })
}

func (v *view) StopArray(ctx context.Context, device string) error {
	return change(ctx, v, "StopArray", device, func() error { return v.n.stopArray(device) })
}
