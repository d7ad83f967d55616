package powerloss

import (
	"fmt"
	"path"
	"strings"
)

// Root is a directory whose content is followed. It is there, and durable, from
// the beginning.
type Root struct {
	Path string
	// Only is a pattern for the names in it that are followed; empty: all.
	Only string
}

// Disk is what the calls of a trace have made of the roots.
type Disk struct {
	roots []Root
	top   map[string]*node // by the path of the root
	seq   int
	at    map[at]int64      // where a descriptor writes next
	syncs map[*Call]covered // syncs that have begun

	// IgnoreSync makes nothing of what is synced durable, for files or for
	// directories: what a program relies on must be missed then.
	IgnoreFileSync, IgnoreDirSync bool
}

// at is a descriptor of a file. Descriptors of the same number in two programs
// are taken for one, unless they have another file; each open begins anew.
type at struct {
	node *node
	fd   int
}

// covered is what a sync makes durable.
type covered struct {
	node *node
	seq  int
}

// node is a file or a directory.
type node struct {
	dir     bool
	names   map[string]*node // of a directory, as programs see it
	size    int64            // of a file, as programs see it
	durable content
	pending []change // what is not durable, the oldest first
}

// content is what is on the disk.
type content struct {
	names map[string]*node
	data  []byte
}

// change is one change of a file or a directory. A rename is one change, so that
// it is there whole or not at all.
type change struct {
	seq   int
	names map[string]*node // nil: the name is removed
	off   int64
	data  []byte
	size  int64 // the new size, when cut is set
	cut   bool
}

// pendingMost bounds what is kept when syncs are ignored; what is older has
// reached the disk by itself.
const pendingMost = 48

// NewDisk returns a disk with empty roots.
func NewDisk(roots ...Root) *Disk {
	d := &Disk{roots: roots, top: map[string]*node{}, at: map[at]int64{}, syncs: map[*Call]covered{}}
	for _, r := range roots {
		d.top[r.Path] = newNode(true)
	}
	return d
}

func newNode(dir bool) *node {
	n := &node{dir: dir}
	if dir {
		n.names, n.durable.names = map[string]*node{}, map[string]*node{}
	}
	return n
}

// below returns the root of a path and what of the path is below it.
func (d *Disk) below(p string) (*node, string) {
	for _, r := range d.roots {
		if p == r.Path {
			return d.top[r.Path], ""
		}
		rest, ok := strings.CutPrefix(p, r.Path+"/")
		if !ok {
			continue
		}
		first, _, _ := strings.Cut(rest, "/")
		if match, err := path.Match(r.Only, first); r.Only == "" || err == nil && match {
			return d.top[r.Path], rest
		}
	}
	return nil, ""
}

// Follows reports whether a path is below a root.
func (d *Disk) Follows(p string) bool {
	n, _ := d.below(path.Clean(p))
	return n != nil
}

// find returns what is at a path; nil when there is nothing.
func (d *Disk) find(p string) *node {
	n, rest := d.below(path.Clean(p))
	for rest != "" && n != nil {
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		n = n.names[name]
	}
	return n
}

func (n *node) push(d *Disk, c change) {
	d.seq++
	c.seq = d.seq
	n.pending = append(n.pending, c)
	for name, to := range c.names {
		if to == nil {
			delete(n.names, name)
		} else {
			n.names[name] = to
		}
	}
	if c.cut {
		n.size = c.size
	}
	n.size = max(n.size, c.off+int64(len(c.data)))
	ignored := n.dir && d.IgnoreDirSync || !n.dir && d.IgnoreFileSync
	if ignored && len(n.pending) > pendingMost {
		n.durable.apply(n.pending[0])
		n.pending = n.pending[1:]
	}
}

func (c *content) apply(ch change) {
	for name, to := range ch.names {
		if to == nil {
			delete(c.names, name)
		} else {
			c.names[name] = to
		}
	}
	if ch.cut {
		c.resize(ch.size)
	}
	if end := ch.off + int64(len(ch.data)); len(ch.data) > 0 {
		if end > int64(len(c.data)) {
			c.resize(end)
		}
		copy(c.data[ch.off:], ch.data)
	}
}

func (c *content) resize(size int64) {
	if size <= int64(len(c.data)) {
		c.data = c.data[:size:size]
		return
	}
	grown := make([]byte, size)
	copy(grown, c.data)
	c.data = grown
}

// finish makes what a sync covers durable: what was written before it began.
func (d *Disk) finish(s covered) {
	if s.node.dir && d.IgnoreDirSync || !s.node.dir && d.IgnoreFileSync {
		return
	}
	for len(s.node.pending) > 0 && s.node.pending[0].seq <= s.seq {
		s.node.durable.apply(s.node.pending[0])
		s.node.pending = s.node.pending[1:]
	}
}

// parent returns the directory of a path, which must be there.
func (d *Disk) parent(p string) (*node, string, error) {
	dir, name := path.Split(path.Clean(p))
	n := d.find(strings.TrimSuffix(dir, "/"))
	if n == nil || !n.dir {
		return nil, "", fmt.Errorf("%s: its directory is not there", p)
	}
	return n, name, nil
}
