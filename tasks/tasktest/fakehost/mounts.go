package fakehost

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

func errHung(op, p string) error {
	return fmt.Errorf("%s %s: no answer: %w", op, p, context.DeadlineExceeded)
}

// mount puts m on the table.
func (n *Node) mount(m host.Mount) {
	m.ID, m.Parent = n.mounts[len(n.mounts)-1].ID+1, n.over(m.Target).ID
	n.mounts = append(n.mounts, m)
	if _, ok := n.entries[m.Dev+"|"+m.Root]; !ok {
		n.entries[m.Dev+"|"+m.Root] = entry{mode: fs.ModeDir | 0o755}
	}
	// Systemd sees the mount, and loads its unit if it does not know it yet.
	n.load(unitName(m.Target))
}

// umount takes the last mount at target off the table.
func (n *Node) umount(target string) bool {
	for i, m := range slices.Backward(n.mounts) {
		if m.Target == target {
			n.mounts = slices.Delete(n.mounts, i, i+1)
			if u := n.loaded[unitName(target)]; u.fragment == mountInfo && n.over(target).Target != target {
				delete(n.loaded, unitName(target))
			}
			return true
		}
	}
	return false
}

// mountUnit does what systemd and mount(8) do to start a mount unit.
func (n *Node) mountUnit(name string, u unit) error {
	where, what := u.last("Mount.Where"), u.last("Mount.What")
	if unitName(where) != name {
		return fmt.Errorf("unit %s: Where= is %s: result bad-setting: %w", name, where, host.ErrJob)
	}
	if n.real(where, true) != where {
		return fmt.Errorf("unit %s: %s has a symbolic link: result resources: %w", name, where, host.ErrJob)
	}
	n.mkdirAll(where)
	var opts []string
	access := "rw"
	for o := range strings.SplitSeq(u.last("Mount.Options"), ",") {
		if o == "ro" {
			access = "ro"
		}
		opts = append(opts, o)
	}
	m := host.Mount{Target: where, Root: "/", Options: []string{access, "relatime"}, Super: []string{"rw"}}
	err := n.source(&m, u.last("Mount.Type"), what, opts)
	if n.lies[what] {
		return fmt.Errorf("unit %s: mount process finished, and there is no mount: result protocol: %w", name, host.ErrJob)
	}
	if err != nil {
		return fmt.Errorf("unit %s: %w: result exit-code: %w", name, err, host.ErrJob)
	}
	n.mount(m)
	return nil
}

// source fills in what is mounted.
func (n *Node) source(m *host.Mount, fstype, what string, opts []string) error {
	switch {
	case slices.Contains(opts, "bind"):
		src := n.real(what, true)
		e, ok := n.entries[n.key(src)]
		if !ok || !e.mode.IsDir() {
			return fmt.Errorf("special device %s does not exist", what)
		}
		from := n.over(src)
		m.Dev, m.Root, _ = strings.Cut(n.key(src), "|")
		m.FSType, m.Source, m.Super = from.FSType, from.Source, from.Super
		return nil
	case fstype == "tmpfs":
		n.nextDev++
		m.Dev, m.FSType, m.Source = fmt.Sprintf("0:%d", n.nextDev), fstype, what
		m.Super = append(m.Super, tmpfsOptions(opts)...)
		return nil
	case fstype == "glusterfs":
		return n.gluster(m, what, opts)
	case len(n.disks) > 0 && (fstype == "xfs" || fstype == "ext4"):
		return n.device(m, what, fstype)
	default:
		return n.served(m, fstype, what, opts)
	}
}

func tmpfsOptions(opts []string) []string {
	var out []string
	for _, o := range opts {
		if v, ok := strings.CutPrefix(o, "size="); ok {
			size, err := strconv.ParseUint(v, 10, 64)
			if err == nil {
				out = append(out, fmt.Sprintf("size=%dk", (size+4095)/4096*4))
			}
		}
		if v, ok := strings.CutPrefix(o, "mode="); ok && v != "1777" {
			out = append(out, "mode="+strings.TrimLeft(v, "0"))
		}
	}
	return out
}

func (n *Node) gluster(m *host.Mount, what string, opts []string) error {
	if _, err := n.findProgram("mount.glusterfs"); err != nil || !n.fstypes["fuse"] {
		return fmt.Errorf("unknown filesystem type %q", "glusterfs")
	}
	server, volume, _ := strings.Cut(what, ":")
	names := []string{server}
	for _, o := range opts {
		if v, ok := strings.CutPrefix(o, "backup-volfile-servers="); ok {
			names = append(names, strings.Split(v, ":")...)
		}
	}
	for _, s := range names {
		if dev, ok := n.volumes[s+":"+volume]; ok {
			m.Dev, m.FSType, m.Source = dev, "fuse.glusterfs", s+":"+volume
			m.Super = append(m.Super, "user_id=0", "group_id=0", "allow_other")
			return nil
		}
	}
	return errors.New("mount failed, see /var/log/glusterfs")
}

// users returns who keeps the mount at target busy.
func (n *Node) usersOf(target string) []host.Use {
	var out []host.Use
	for _, u := range n.uses {
		if within(u.path, target) {
			out = append(out, u.Use)
		}
	}
	return out
}

func (n *Node) probe(op, dir string) (host.Mount, error) {
	m := n.over(dir)
	if n.hung[m.Dev] {
		return m, errHung(op, dir)
	}
	if n.dead(m) {
		return m, fmt.Errorf("%s %s: %w", op, dir, host.ErrDisconnected)
	}
	if n.stale[m.Dev] {
		return m, fmt.Errorf("%s %s: %w", op, dir, host.ErrStale)
	}
	_, _, err := n.find(op, dir)
	return m, err
}

func (n *Node) probeWrite(dir string) error {
	m, err := n.probe("write to", dir)
	if err == nil && m.ReadOnly() {
		err = fmt.Errorf("write to %s: read-only file system", dir)
	}
	return err
}

func (n *Node) probeCapacity(dir string) (host.Capacity, error) {
	m, err := n.probe("statfs", dir)
	if err != nil {
		return host.Capacity{}, err
	}
	total := uint64(1 << 40)
	for _, o := range m.Super {
		if v, ok := strings.CutPrefix(o, "size="); ok {
			kib, err := strconv.ParseUint(strings.TrimSuffix(v, "k"), 10, 64)
			if err != nil {
				return host.Capacity{}, fmt.Errorf("size of %s: %w", dir, err)
			}
			total = kib << 10
		}
	}
	return host.Capacity{TotalBytes: total, FreeBytes: total / 2}, nil
}

// unitName escapes a mount point as systemd does.
func unitName(p string) string {
	p = strings.Trim(path.Clean(p), "/")
	if p == "" {
		return "-.mount"
	}
	name := ""
	for i, c := range []byte(p) {
		switch {
		case c == '/':
			name += "-"
		case strings.IndexByte("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:_.", c) >= 0 && (i > 0 || c != '.'):
			name += string(c)
		default:
			name += fmt.Sprintf("\\x%02x", c)
		}
	}
	return name + ".mount"
}
