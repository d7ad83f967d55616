package fakehost

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// over returns the mount on which a path lies.
func (n *Node) over(p string) host.Mount {
	var best host.Mount
	for _, m := range n.mounts {
		if within(p, m.Target) && len(m.Target) >= len(best.Target) {
			best = m
		}
	}
	return best
}

// key returns the device of a path, and where it stands on the device.
func (n *Node) key(p string) string {
	m := n.over(p)
	return m.Dev + "|" + path.Join(m.Root, strings.TrimPrefix(p, m.Target))
}

func within(p, dir string) bool { return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/") }

// real follows the symbolic links in a path; those at its end too when end is
// set.
func (n *Node) real(p string, end bool) string {
	for range 40 {
		next := n.followFirst(p, end)
		if next == p {
			return p
		}
		p = next
	}
	return p
}

func (n *Node) followFirst(p string, end bool) string {
	parts := strings.Split(strings.TrimPrefix(p, "/"), "/")
	for i := range parts {
		at := "/" + path.Join(parts[:i+1]...)
		e := n.entries[n.key(at)]
		if e.mode&fs.ModeSymlink == 0 || i == len(parts)-1 && !end {
			continue
		}
		target := e.target
		if !path.IsAbs(target) {
			target = path.Join(path.Dir(at), target)
		}
		return path.Join(append([]string{target}, parts[i+1:]...)...)
	}
	return p
}

// find returns what stands at a path, without following a link at its end.
func (n *Node) find(op, p string) (entry, string, error) {
	p = n.real(p, false)
	k := n.key(p)
	if n.hung[n.over(p).Dev] {
		return entry{}, k, errHung(op, p)
	}
	e, ok := n.entries[k]
	if !ok {
		return entry{}, k, fmt.Errorf("%s %s: %w", op, p, fs.ErrNotExist)
	}
	return e, k, nil
}

func (n *Node) children(k string) []string {
	var names []string
	for c := range n.entries {
		if c != k && path.Dir(c) == strings.TrimSuffix(k, "/") {
			names = append(names, path.Base(c))
		}
	}
	slices.Sort(names)
	return names
}

func (n *Node) readFile(p string) (host.File, error) {
	e, _, err := n.find("read", n.real(p, true))
	if err != nil {
		return host.File{}, err
	}
	if !e.mode.IsRegular() {
		return host.File{}, fmt.Errorf("read %s: not a regular file", p)
	}
	if len(e.data) > 4<<20 {
		return host.File{}, fmt.Errorf("read %s: larger than 4 MiB", p)
	}
	return host.File{Data: []byte(e.data), Mode: e.mode}, nil
}

func (n *Node) lstat(p string) (host.FileInfo, error) {
	e, _, err := n.find("lstat", p)
	if err != nil {
		return host.FileInfo{}, err
	}
	return host.FileInfo{Mode: e.mode, Size: int64(len(e.data)), Target: e.target}, nil
}

func (n *Node) readDir(p string) ([]string, error) {
	e, k, err := n.find("list", n.real(p, true))
	if err != nil {
		return nil, err
	}
	if !e.mode.IsDir() {
		return nil, fmt.Errorf("list %s: not a directory", p)
	}
	return n.children(k), nil
}

func (n *Node) writeFile(p string, f host.File) error {
	return n.put("write", p, entry{mode: f.Mode.Perm(), data: string(f.Data)})
}

// put replaces what stands at a path. The directory above must be there.
func (n *Node) put(op, p string, e entry) error {
	dir, _, err := n.find(op, n.real(path.Dir(p), true))
	if err != nil {
		return err
	}
	if !dir.mode.IsDir() {
		return fmt.Errorf("%s %s: %s is not a directory", op, p, path.Dir(p))
	}
	p = path.Join(n.real(path.Dir(p), true), path.Base(p))
	if n.over(p).ReadOnly() {
		return fmt.Errorf("%s %s: read-only file system", op, p)
	}
	if old, ok := n.entries[n.key(p)]; ok && old.mode.IsDir() {
		return fmt.Errorf("%s %s: is a directory", op, p)
	}
	n.entries[n.key(p)] = e
	return nil
}

func (n *Node) removeFile(p string) error {
	p = path.Join(n.real(path.Dir(p), true), path.Base(p))
	e, ok := n.entries[n.key(p)]
	if !ok {
		return nil
	}
	if e.mode.IsDir() {
		return fmt.Errorf("remove %s: is a directory", p)
	}
	if n.over(p).ReadOnly() {
		return fmt.Errorf("remove %s: read-only file system", p)
	}
	delete(n.entries, n.key(p))
	return nil
}

func (n *Node) makeDir(p string, mode fs.FileMode) error {
	p = path.Join(n.real(path.Dir(p), true), path.Base(p))
	if e, ok := n.entries[n.key(p)]; ok {
		if !e.mode.IsDir() {
			return fmt.Errorf("make directory %s: %w", p, fs.ErrExist)
		}
		return nil
	}
	return n.put("make directory", p, entry{mode: fs.ModeDir | mode.Perm()})
}

func (n *Node) removeDir(p string) error {
	p = path.Join(n.real(path.Dir(p), true), path.Base(p))
	if m := n.over(p); m.Target == p {
		return fmt.Errorf("remove directory %s: %s is mounted there", p, m.Source)
	}
	e, ok := n.entries[n.key(p)]
	switch {
	case !ok:
		return nil
	case !e.mode.IsDir():
		return fmt.Errorf("remove directory %s: not a directory", p)
	case len(n.children(n.key(p))) > 0:
		return fmt.Errorf("remove directory %s: not empty", p)
	}
	delete(n.entries, n.key(p))
	return nil
}
