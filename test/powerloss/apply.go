package powerloss

import (
	"fmt"
	"path"
	"strings"
)

// cannotFollow are calls that change files in a way that is not modelled.
var cannotFollow = map[string]int{
	"copy_file_range": 2, "splice": 2, "sendfile": 0, "pwritev": 0, "pwritev2": 0, "writev": 0,
}

// Apply follows one event and reports whether what is, or may be, on the disk
// has changed. A call that changes a followed file in a way that is not
// understood is an error.
func (d *Disk) Apply(e Event) (changed bool, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("thread %d at %d: %s: %w", e.Thread, e.Start, e.Name, err)
		}
	}()
	switch e.Name {
	case "fsync", "fdatasync":
		return d.sync(e)
	case "sync", "syncfs", "sync_file_range":
		return false, nil // no program here may rely on them
	}
	if !e.End || e.Result < 0 {
		return false, nil
	}
	if i, ok := cannotFollow[e.Name]; ok {
		if _, p := e.fd(i); d.Follows(p) {
			return false, fmt.Errorf("%s: cannot be followed", p)
		}
		return false, nil
	}
	switch e.Name {
	case "open", "openat", "openat2", "creat":
		return d.open(e.Call)
	case "write", "pwrite64", "lseek", "ftruncate", "fallocate":
		return d.write(e.Call)
	case "truncate":
		if p, _ := e.text(0); d.Follows(p) {
			return false, fmt.Errorf("%s: cannot be followed", p)
		}
	case "mkdir", "mkdirat", "unlink", "unlinkat", "rmdir", "rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat":
		return d.name(e.Call)
	}
	return false, nil
}

func (d *Disk) sync(e Event) (bool, error) {
	if !e.End {
		_, p := e.fd(0)
		if n := d.find(p); n != nil {
			d.syncs[e.Call] = covered{n, d.seq}
		} else if d.Follows(p) && !deleted(p) {
			return false, fmt.Errorf("%s is not there", p)
		}
		return false, nil
	}
	s, ok := d.syncs[e.Call]
	delete(d.syncs, e.Call)
	if !ok || e.Result != 0 {
		return false, nil
	}
	d.finish(s)
	return true, nil
}

func deleted(p string) bool { return strings.HasSuffix(p, "(deleted)") }

// pathAt is the path of the arguments dir and name, or of name alone when dir is
// below 0.
func (c *Call) pathAt(dir, name int) (string, error) {
	p, whole := c.text(name)
	if !whole {
		return "", fmt.Errorf("argument %d is not a whole path", name)
	}
	if path.IsAbs(p) || dir < 0 {
		return path.Clean(p), nil
	}
	_, base := c.fd(dir)
	return path.Join(base, p), nil
}

func (d *Disk) open(c *Call) (bool, error) {
	dir, name := -1, 0
	if strings.HasPrefix(c.Name, "openat") {
		dir, name = 0, 1
	}
	p, err := c.pathAt(dir, name)
	if err != nil || !d.Follows(p) {
		return false, err
	}
	flags := strings.Join(c.Args[name+1:], "|")
	if !strings.Contains(flags, "O_WRONLY") && !strings.Contains(flags, "O_RDWR") {
		return false, nil
	}
	if strings.Contains(flags, "O_TMPFILE") || strings.Contains(flags, "O_APPEND") {
		return false, fmt.Errorf("%s: %s cannot be followed", p, flags)
	}
	changed, n := false, d.find(p)
	if n == nil {
		if !strings.Contains(flags, "O_CREAT") {
			return false, fmt.Errorf("%s is not there", p)
		}
		parent, base, err := d.parent(p)
		if err != nil {
			return false, err
		}
		n = newNode(false)
		parent.push(d, change{names: map[string]*node{base: n}})
		changed = true
	}
	if strings.Contains(flags, "O_TRUNC") && n.size > 0 {
		n.push(d, change{cut: true})
		changed = true
	}
	d.at[at{n, int(c.Result)}] = 0
	return changed, nil
}

func (d *Disk) write(c *Call) (bool, error) {
	fd, p := c.fd(0)
	if !d.Follows(p) || deleted(p) {
		return false, nil
	}
	n := d.find(p)
	if n == nil {
		return false, fmt.Errorf("%s is not there", p)
	}
	key := at{n, fd}
	switch c.Name {
	case "lseek":
		d.at[key] = c.Result
		return false, nil
	case "ftruncate":
		n.push(d, change{cut: true, size: c.number(1)})
		return true, nil
	case "fallocate":
		if c.Args[1] != "FALLOC_FL_KEEP_SIZE" {
			return false, fmt.Errorf("%s: mode %s cannot be followed", p, c.Args[1])
		}
		return false, nil // it changes no byte
	}
	data, whole := c.text(1)
	if !whole || int64(len(data)) < c.Result {
		return false, fmt.Errorf("%s: the trace holds %d of %d bytes", p, len(data), c.Result)
	}
	off := d.at[key]
	if c.Name == "pwrite64" {
		off = c.number(3)
	} else {
		d.at[key] += c.Result
	}
	n.push(d, change{off: off, data: []byte(data[:c.Result])})
	return true, nil
}

// paths are the one or two paths that a call names.
func (c *Call) paths() ([]string, error) {
	n := 1
	if strings.HasPrefix(c.Name, "rename") || strings.HasPrefix(c.Name, "link") {
		n = 2
	}
	var out []string
	for i := range n {
		dir, name := -1, i
		if strings.Contains(c.Name, "at") {
			dir, name = 2*i, 2*i+1
		}
		p, err := c.pathAt(dir, name)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// name follows the calls that change a directory.
func (d *Disk) name(c *Call) (bool, error) {
	if strings.HasPrefix(c.Name, "symlink") {
		if p, _ := c.text(len(c.Args) - 1); d.Follows(p) {
			return false, fmt.Errorf("%s: a symbolic link cannot be followed", p)
		}
		return false, nil
	}
	paths, err := c.paths()
	if err != nil {
		return false, err
	}
	last := paths[len(paths)-1]
	if !d.Follows(paths[0]) && !d.Follows(last) || d.top[last] != nil {
		return false, nil // a root is there from the beginning
	}
	parent, base, err := d.parent(last)
	if err != nil {
		return false, err
	}
	names := map[string]*node{base: nil}
	switch {
	case len(paths) == 2:
		if path.Dir(paths[0]) != path.Dir(last) {
			return false, fmt.Errorf("%s to %s: from one directory to another cannot be followed", paths[0], last)
		}
		if names[base] = d.find(paths[0]); names[base] == nil {
			return false, fmt.Errorf("%s is not there", paths[0])
		}
		if strings.HasPrefix(c.Name, "rename") {
			names[path.Base(paths[0])] = nil
		}
	case strings.HasPrefix(c.Name, "mkdir"):
		names[base] = newNode(true)
	}
	parent.push(d, change{names: names})
	return true, nil
}
