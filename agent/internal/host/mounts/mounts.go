// Package mounts reads the kernel's mount table. It never touches a mounted
// file system, so that it answers while one hangs.
package mounts

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/tasks/host"
)

// Config says where the kernel's files are.
type Config struct {
	// Proc is the proc file system; unset: /proc.
	Proc string
	// Sys is the sys file system; unset: /sys.
	Sys string
	// Modules is the directory of the running kernel's modules; unset:
	// /lib/modules/RELEASE.
	Modules string
}

// Table implements host.MountReader. It is safe for concurrent use.
type Table struct{ cfg Config }

// New returns the machine's mount table.
func New(cfg Config) *Table {
	if cfg.Proc == "" {
		cfg.Proc = "/proc"
	}
	if cfg.Sys == "" {
		cfg.Sys = "/sys"
	}
	return &Table{cfg: cfg}
}

// Mounts implements host.MountReader: the table of process 1, in order. Of
// several mounts at one target the last one is seen.
func (t *Table) Mounts(ctx context.Context) ([]host.Mount, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("read mount table: %w", err)
	}
	return t.of("1")
}

func (t *Table) of(pid string) ([]host.Mount, error) {
	b, err := os.ReadFile(filepath.Join(t.cfg.Proc, pid, "mountinfo"))
	if err != nil {
		return nil, fmt.Errorf("read mount table: %w", err)
	}
	table, err := Parse(b)
	return disguised(table), err
}

// At returns the mount that is seen at target.
func At(table []host.Mount, target string) (host.Mount, bool) {
	for i := len(table) - 1; i >= 0; i-- {
		if table[i].Target == target {
			return table[i], true
		}
	}
	return host.Mount{}, false
}

// Parse reads a mountinfo file, as proc(5) describes it. A line that does not
// have that form is an error that names it.
func Parse(b []byte) ([]host.Mount, error) {
	var out []host.Mount
	for n := 1; len(b) > 0; n++ {
		var line []byte
		line, b, _ = bytes.Cut(b, []byte("\n"))
		if len(line) == 0 {
			continue
		}
		m, err := parseLine(string(line))
		if err != nil {
			return nil, fmt.Errorf("mount table line %d: %w", n, err)
		}
		out = append(out, m)
	}
	return out, nil
}

var errForm = errors.New("not of the form of proc(5)")

// parseLine reads, for example:
//
//	36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
//
// The source may be empty: then two spaces follow the type.
func parseLine(line string) (host.Mount, error) {
	front, back, ok := strings.Cut(line, " - ")
	f := strings.Split(front, " ")
	g := strings.Split(back, " ")
	if !ok || len(f) < 6 || len(g) < 3 {
		return host.Mount{}, fmt.Errorf("%q: %w", line, errForm)
	}
	id, err := strconv.Atoi(f[0])
	if err != nil {
		return host.Mount{}, fmt.Errorf("%q: %w: mount id", line, errForm)
	}
	parent, err := strconv.Atoi(f[1])
	if err != nil {
		return host.Mount{}, fmt.Errorf("%q: %w: parent id", line, errForm)
	}
	major, minor, ok := strings.Cut(f[2], ":")
	if _, e1 := strconv.ParseUint(major, 10, 32); !ok || e1 != nil {
		return host.Mount{}, fmt.Errorf("%q: %w: device", line, errForm)
	}
	if _, e2 := strconv.ParseUint(minor, 10, 32); e2 != nil {
		return host.Mount{}, fmt.Errorf("%q: %w: device", line, errForm)
	}
	return host.Mount{
		ID: id, Parent: parent, Dev: f[2],
		Root: unescape(f[3]), Target: unescape(f[4]), Options: strings.Split(f[5], ","),
		FSType: unescape(g[0]), Source: unescape(g[1]),
		// An option of the file system may hold a space that nobody escaped.
		Super: strings.Split(unescape(strings.Join(g[2:], " ")), ","),
	}, nil
}

// unescape replaces the octal escapes with which the kernel writes space, tab,
// newline, backslash and #.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if v, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(v))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// FilesystemKnown reports whether the kernel can mount the type, or could after
// it has loaded a module. A subtype as in fuse.glusterfs does not matter.
func (t *Table) FilesystemKnown(ctx context.Context, fstype string) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, fmt.Errorf("look for file system %s: %w", fstype, err)
	}
	fstype, _, _ = strings.Cut(fstype, ".")
	b, err := os.ReadFile(filepath.Join(t.cfg.Proc, "filesystems"))
	if err != nil {
		return false, fmt.Errorf("look for file system %s: %w", fstype, err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 0 && f[len(f)-1] == fstype {
			return true, nil
		}
	}
	return t.moduleKnown(fstype)
}

// moduleKnown looks for a module that has the alias fs-TYPE, by which the
// kernel asks for it.
func (t *Table) moduleKnown(fstype string) (bool, error) {
	dir, err := t.modules()
	if err != nil {
		return false, fmt.Errorf("look for file system %s: %w", fstype, err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "modules.alias"))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil // no modules can be loaded
	}
	if err != nil {
		return false, fmt.Errorf("look for file system %s: %w", fstype, err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, "alias fs-"+fstype+" ") {
			return true, nil
		}
	}
	return false, nil
}

// modules is the directory of the running kernel's modules.
func (t *Table) modules() (string, error) {
	if t.cfg.Modules != "" {
		return t.cfg.Modules, nil
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("uname: %w", err)
	}
	return filepath.Join("/lib/modules", unix.ByteSliceToString(u.Release[:])), nil
}
