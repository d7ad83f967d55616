package step

import (
	"fmt"
	"path"
	"slices"
	"strings"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// FSTypeBind is the type that a step gives a bind mount. The mount table never
// has it: it names the file system that the source lies on.
const FSTypeBind = "bind"

// MountAt returns the mount that is seen at a mount point, the last one of a
// stack, and how many there are.
func MountAt(table []host.Mount, where string) (m host.Mount, depth int) {
	for _, c := range table {
		if c.Target == where {
			m, depth = c, depth+1
		}
	}
	return m, depth
}

// MountOver returns the mount that a path lies on.
func MountOver(table []host.Mount, p string) (host.Mount, bool) {
	var best host.Mount
	var found bool
	for _, m := range table {
		if Within(p, m.Target) && (!found || len(m.Target) >= len(best.Target)) {
			best, found = m, true
		}
	}
	return best, found
}

// MountsBelow returns the mount points below a directory, in order.
func MountsBelow(table []host.Mount, dir string) []string {
	var out []string
	for _, m := range table {
		if m.Target != dir && Within(m.Target, dir) && !slices.Contains(out, m.Target) {
			out = append(out, m.Target)
		}
	}
	return out
}

// MountDiff is one thing in which a mount is not what a step wants.
type MountDiff struct{ What, Have, Want string }

// CompareMount says in what the mount at a mount point differs from what a
// mount step wants there. It only looks at the table.
func CompareMount(table []host.Mount, want *taskv1.MountUnitStep) []MountDiff {
	m, depth := MountAt(table, want.GetWhere())
	if depth == 0 {
		return []MountDiff{{Want: want.GetSource() + " (" + want.GetFstype() + ")"}}
	}
	diffs := compareSource(table, m, want)
	if depth > 1 {
		diffs = append(diffs, MountDiff{"stack", fmt.Sprintf("%d mounts", depth), "1 mount"})
	}
	if have := m.ReadOnly(); have != want.GetReadOnly() {
		diffs = append(diffs, MountDiff{"option", access(have), access(want.GetReadOnly())})
	}
	return diffs
}

func compareSource(table []host.Mount, m host.Mount, want *taskv1.MountUnitStep) []MountDiff {
	if want.GetFstype() != FSTypeBind {
		var diffs []MountDiff
		if m.FSType != want.GetFstype() {
			diffs = append(diffs, MountDiff{"type", m.FSType, want.GetFstype()})
		}
		if !sameSource(m, want) {
			diffs = append(diffs, MountDiff{"source", m.Source, want.GetSource()})
		}
		if m.Root != "/" && len(diffs) == 0 {
			diffs = append(diffs, MountDiff{"root", m.Root, "/"})
		}
		return diffs
	}
	over, ok := MountOver(table, want.GetSource())
	if ok && m.Dev == over.Dev && m.Root == below(over, want.GetSource()) {
		return nil
	}
	return []MountDiff{{"source", shown(table, m), want.GetSource()}}
}

// sameSource reports whether a mount has one of the names that a step wants.
func sameSource(m host.Mount, want *taskv1.MountUnitStep) bool {
	return m.Source == want.GetSource() || slices.Contains(want.GetOtherSources(), m.Source) ||
		want.GetAnyServer() && exported(m.Source) == exported(want.GetSource())
}

// exported is what a source names besides its servers.
func exported(source string) string { return source[max(0, strings.LastIndex(source, ":/")):] }

// below returns where a path of the node stands in the file system of the mount
// that it lies on.
func below(over host.Mount, p string) string {
	return path.Join(over.Root, strings.TrimPrefix(p, over.Target))
}

// shown names what a mount shows: a directory of the node where the table tells
// which one it is, otherwise the source as the table has it.
func shown(table []host.Mount, m host.Mount) string {
	for _, o := range table {
		if o.Dev == m.Dev && o.Target != m.Target && Within(m.Root, o.Root) {
			rel := m.Root
			if o.Root != "/" {
				rel = strings.TrimPrefix(m.Root, o.Root)
			}
			return path.Join(o.Target, rel)
		}
	}
	if m.Root == "/" || m.Root == "" {
		return m.Source
	}
	return m.Source + "[" + m.Root + "]"
}

func access(readOnly bool) string {
	if readOnly {
		return "ro"
	}
	return "rw"
}

// local are the file system types that answer as long as the machine does. A
// path on any other type is not looked at: that could hang for ever.
var local = []string{
	"bcachefs", "btrfs", "devtmpfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay", "ramfs",
	"reiserfs", "rootfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs",
}

// MayHang returns the mount on which a path lies, when a look at the path could
// hang. The root is not such a mount: without it nothing works anyway.
func MayHang(table []host.Mount, p string) (host.Mount, bool) {
	m, ok := MountOver(table, p)
	if !ok || m.Target == "/" {
		return m, false
	}
	for _, t := range local {
		if m.FSType == t {
			return m, false
		}
	}
	return m, true
}
