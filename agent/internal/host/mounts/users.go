package mounts

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/tasks/host"
)

// maxUsers is the most that [Table.Users] returns.
const maxUsers = 100

// Users implements host.MountReader. Besides processes it names the mounts and
// loop devices that stand on the mount, with process id 0. A target that is not
// a mount point has none.
func (t *Table) Users(ctx context.Context, target string) ([]host.Use, error) {
	table, err := t.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	m, ok := At(table, target)
	if !ok {
		return nil, nil
	}
	s := &scan{proc: t.cfg.Proc, mount: m, ids: map[uint64]bool{uint64(m.ID): true}, tables: map[string]bool{}}
	for _, n := range table {
		if n.Parent == m.ID {
			s.add(0, "kernel", "mount "+n.Target)
		}
	}
	s.loops(t.cfg.Sys)
	pids, err := processes(t.cfg.Proc)
	if err != nil {
		return nil, fmt.Errorf("find users of %s: %w", target, err)
	}
	for _, pid := range pids {
		s.otherNamespace(t, pid)
	}
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("find users of %s: %w", target, err)
		}
		s.process(pid)
	}
	return s.uses, nil
}

func processes(proc string) ([]int, error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// scan is one search. Processes come and go while it runs, so what cannot be
// read is passed over.
type scan struct {
	proc   string
	mount  host.Mount
	ids    map[uint64]bool // of the mount, and of its copies in other namespaces
	tables map[string]bool // mount namespaces that were read
	uses   []host.Use
}

func (s *scan) add(pid int, command, how string) {
	if len(s.uses) < maxUsers {
		s.uses = append(s.uses, host.Use{PID: pid, Command: command, How: how})
	}
}

// otherNamespace finds the copies of the mount in the mount namespace of a
// process: they show the same part of the same device.
func (s *scan) otherNamespace(t *Table, pid int) {
	ns, err := os.Readlink(filepath.Join(s.proc, strconv.Itoa(pid), "ns", "mnt"))
	if err != nil || s.tables[ns] {
		return
	}
	own, err := os.Readlink(filepath.Join(s.proc, "1", "ns", "mnt"))
	s.tables[ns] = true
	if err != nil || ns == own {
		return
	}
	table, err := t.of(strconv.Itoa(pid))
	if err != nil {
		return
	}
	for _, m := range table {
		if m.Dev == s.mount.Dev && m.Root == s.mount.Root && m.FSType == s.mount.FSType {
			s.ids[uint64(m.ID)] = true
		}
	}
}

func (s *scan) process(pid int) {
	dir := filepath.Join(s.proc, strconv.Itoa(pid))
	var hows []string
	for _, name := range []string{"cwd", "root", "exe"} {
		if s.on(filepath.Join(dir, name)) {
			hows = append(hows, name)
		}
	}
	for _, fd := range names(filepath.Join(dir, "fd")) {
		if s.on(filepath.Join(dir, "fd", fd)) {
			hows = append(hows, "fd "+fd)
		}
	}
	for _, area := range names(filepath.Join(dir, "map_files")) {
		if s.on(filepath.Join(dir, "map_files", area)) {
			hows = append(hows, "map")
			break
		}
	}
	if len(hows) > 0 {
		command := s.command(dir)
		for _, how := range hows {
			s.add(pid, command, how)
		}
	}
}

func names(dir string) []string {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }() // it was only read
	out, _ := f.Readdirnames(-1)     // what was read until the process ended will do
	return out
}

// on reports whether what a link of proc leads to is on the mount. The link is
// followed by the kernel without a path walk, and the inode is described from
// what the kernel has at hand, so that a hanging server is not asked.
func (s *scan) on(link string) bool {
	var st unix.Statx_t
	flags := unix.AT_STATX_DONT_SYNC | unix.AT_NO_AUTOMOUNT
	if err := unix.Statx(unix.AT_FDCWD, link, flags, unix.STATX_TYPE|unix.STATX_MNT_ID, &st); err != nil {
		return s.byPath(link)
	}
	if st.Mask&unix.STATX_MNT_ID != 0 {
		return s.ids[st.Mnt_id]
	}
	return fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor) == s.mount.Dev && s.byPath(link)
}

// byPath decides by the name under which the kernel shows the link: for kernels
// before 5.8, and for file systems that do not answer.
func (s *scan) byPath(link string) bool {
	p, err := os.Readlink(link)
	return err == nil && below(p, s.mount.Target)
}

func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// command is the command line, or the name of a process that has none.
func (s *scan) command(dir string) string {
	if b, err := os.ReadFile(filepath.Join(dir, "cmdline")); err == nil && len(b) > 0 {
		const limit = 200
		line := strings.TrimSpace(strings.ReplaceAll(string(b[:min(len(b), limit)]), "\x00", " "))
		return strings.ToValidUTF8(line, "?")
	}
	b, err := os.ReadFile(filepath.Join(dir, "comm"))
	if err != nil {
		return "?"
	}
	return strings.TrimSpace(string(b))
}

// loops finds loop devices whose file is on the mount.
func (s *scan) loops(sys string) {
	files, err := filepath.Glob(filepath.Join(sys, "block", "loop*", "loop", "backing_file"))
	if err != nil {
		return
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err == nil && below(strings.TrimSpace(string(b)), s.mount.Target) {
			s.add(0, "kernel", "device "+filepath.Base(filepath.Dir(filepath.Dir(f))))
		}
	}
}
