package fakehost

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// helpers are the programs that mount the types of a mount unit, and the file
// systems that the kernel has to know for them.
var helpers = map[string]struct{ program, kernel string }{
	"nfs": {"mount.nfs", "nfs4"}, "lustre": {"mount.lustre", "lustre"}, "wekafs": {"mount.wekafs", ""}, "beegfs": {"", "beegfs"},
	"ceph": {"mount.ceph", "ceph"}, "fuse.s3fs": {"s3fs", "fuse"}, "mount-s3": {"mount.mount-s3", "fuse"},
	"rclone": {"mount.rclone", "fuse"}, "ext4": {"", "ext4"}, "xfs": {"", "xfs"},
}

// served mounts what a server or a disk has.
func (n *Node) served(m *host.Mount, fstype, what string, opts []string) error {
	helper, known := helpers[fstype]
	if slices.Contains(opts, "vers=3") {
		helper.kernel = "nfs"
	}
	_, err := n.findProgram(helper.program)
	if !known || helper.program != "" && err != nil || helper.kernel != "" && !n.fstypes[helper.kernel] {
		return fmt.Errorf("unknown filesystem type %q", fstype)
	}
	m.FSType, m.Source = fstype, what
	if disk := n.real(what, true); disk != what {
		m.Source = disk
	}
	dev, ok := n.volumes[m.Source]
	if left := n.later[what]; left > 0 {
		n.later[what], ok = left-1, false
	}
	if !ok {
		return fmt.Errorf("mount.%s: %s does not answer", fstype, what)
	}
	m.Dev = dev
	n.shownAs(m, fstype, opts)
	return nil
}

// shownAs is how the mount table shows a mount of a type with options.
func (n *Node) shownAs(m *host.Mount, fstype string, opts []string) {
	value := func(key string) string {
		for _, o := range opts {
			if v, ok := strings.CutPrefix(o, key+"="); ok {
				return v
			}
		}
		return ""
	}
	var shown []string
	switch fstype {
	case "nfs":
		if value("vers") != "3" {
			m.FSType = "nfs4"
		}
		shown = []string{"vers", "nconnect", "proto", "hard", "soft"}
	case "lustre":
		shown = []string{"flock", "localflock"}
	case "wekafs":
		shown = []string{"readcache", "writecache"}
	case "ceph":
		shown = []string{"name"}
	case "fuse.s3fs":
		m.Source = value("fsname")
	case "mount-s3":
		m.FSType, m.Source = "fuse", "mountpoint-s3"
	case "rclone":
		m.FSType = "fuse.rclone"
	}
	for _, o := range opts {
		if key, _, _ := strings.Cut(o, "="); slices.Contains(shown, key) {
			m.Super = append(m.Super, o)
		}
	}
}

// dead reports whether the client of a FUSE mount has died, as it does in this
// node when its volume is lost.
func (n *Node) dead(m host.Mount) bool {
	if m.FSType != "fuse" && !strings.HasPrefix(m.FSType, "fuse.") {
		return false
	}
	for _, dev := range n.volumes {
		if dev == m.Dev {
			return false
		}
	}
	return true
}

func (n *Node) mountHealth(target string) host.MountHealth {
	m := n.over(target)
	switch {
	case m.Target != target:
		return ""
	case n.hung[m.Dev]:
		return host.MountHung
	case n.dead(m):
		return host.MountDisconnected
	default:
		return ""
	}
}

// letGo does one stage of an unmount. What is stuck is let go by one of them.
func (n *Node) letGo(target, stage string) error {
	m := n.over(target)
	if m.Target != target {
		return nil
	}
	helps := n.stuck[m.Dev] == stage
	if helps {
		delete(n.stuck, m.Dev)
		delete(n.hung, m.Dev)
	}
	switch {
	case stage == "lazy", stage == "force" && helps:
		n.umount(target)
	case stage == "force":
		return fmt.Errorf("umount --force %s: target is busy", target)
	}
	return nil
}

func (n *Node) resolve(name string) ([]string, error) {
	if n.absent[name] {
		return nil, fmt.Errorf("resolve %s: %w", name, fs.ErrNotExist)
	}
	return []string{name}, nil
}

func (n *Node) dial(address string, port uint32) error {
	if n.absent[fmt.Sprintf("%s:%d", address, port)] {
		return fmt.Errorf("connection refused: %w", host.ErrNoAnswer)
	}
	return nil
}
