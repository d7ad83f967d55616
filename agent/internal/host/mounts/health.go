package mounts

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/unit"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	// sampleApart is the time between two looks at what waits for a FUSE daemon:
	// one request that waits is nothing bad.
	sampleApart = 300 * time.Millisecond
	samples     = 3
)

// blockedIn are parts of the names of the kernel's functions in which a process
// waits for the server of a network file system.
var blockedIn = []string{"rpc_", "nfs", "ceph", "ll_", "ptlrpc", "cl_sync", "ldlm", "beegfs", "FhgfsOps", "wekafs", "request_wait_answer", "fuse_"}

// MountHealth implements host.MountReader. A FUSE mount is disconnected when no
// process serves it any more: none of its unit, and none that could be another's.
// It hangs when its daemon is stopped, or when requests wait for it for a
// second. Any mount hangs when a process that uses it waits for a server without
// end.
func (t *Table) MountHealth(ctx context.Context, target string) (host.MountHealth, error) {
	table, err := t.Mounts(ctx)
	if err != nil {
		return "", err
	}
	m, ok := At(table, target)
	if !ok {
		return "", nil
	}
	pids, err := processes(t.cfg.Proc)
	if err != nil {
		return "", fmt.Errorf("look at the state of %s: %w", target, err)
	}
	if isFuse(m) {
		if health := t.daemon(pids, target); health != "" {
			return health, nil
		}
		if t.allWait(ctx, m) {
			return host.MountHung, nil
		}
	}
	return t.blocked(ctx, target)
}

func isFuse(m host.Mount) bool { return m.FSType == "fuse" || strings.HasPrefix(m.FSType, "fuse.") }

// daemon looks at the processes that serve FUSE mounts: those of the mount's
// unit, or of nobody knows which mount.
func (t *Table) daemon(pids []int, target string) host.MountHealth {
	own := "/" + unit.UnitNamePathEscape(target) + ".mount"
	var states []byte
	stray := false
	for _, pid := range pids {
		group := t.controlGroup(pid)
		mine := strings.HasSuffix(group, own)
		if !mine && strings.HasSuffix(group, ".mount") || !t.servesFuse(pid) {
			continue
		}
		if mine {
			states = append(states, t.state(pid))
		} else {
			stray = true
		}
	}
	switch {
	case len(states) == 0 && !stray:
		return host.MountDisconnected
	case len(states) > 0 && !slices.ContainsFunc(states, func(s byte) bool { return s != 'T' && s != 't' }):
		return host.MountHung
	default:
		return ""
	}
}

// controlGroup is where a process runs, as systemd has it.
func (t *Table) controlGroup(pid int) string {
	b, err := os.ReadFile(filepath.Join(t.cfg.Proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if f := strings.SplitN(line, ":", 3); len(f) == 3 && (f[0] == "0" || f[1] == "name=systemd") && f[2] != "/" {
			return f[2]
		}
	}
	return ""
}

func (t *Table) servesFuse(pid int) bool {
	dir := filepath.Join(t.cfg.Proc, strconv.Itoa(pid), "fd")
	for _, fd := range names(dir) {
		if to, err := os.Readlink(filepath.Join(dir, fd)); err == nil && to == "/dev/fuse" {
			return true
		}
	}
	return false
}

// state is the letter of a process's state, or 0 when it has ended.
func (t *Table) state(pid int) byte {
	b, err := os.ReadFile(filepath.Join(t.cfg.Proc, strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0
	}
	// The name before it may hold any character.
	if i := strings.LastIndexByte(string(b), ')'); i >= 0 && i+2 < len(b) {
		return b[i+2]
	}
	return 0
}

func (t *Table) connection(m host.Mount) string {
	_, minor, _ := strings.Cut(m.Dev, ":")
	return filepath.Join(t.cfg.Sys, "fs/fuse/connections", minor)
}

// allWait reports whether requests wait for a FUSE daemon each time it looks.
func (t *Table) allWait(ctx context.Context, m host.Mount) bool {
	for i := range samples {
		b, err := os.ReadFile(filepath.Join(t.connection(m), "waiting"))
		if err != nil {
			return false // the kernel's counts are not to be seen here
		}
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err != nil || n == 0 {
			return false
		}
		if i < samples-1 && !clock.Sleep(ctx, sampleApart) {
			return false
		}
	}
	return true
}

// blocked looks for a process that uses the mount and waits in the kernel for a
// server, in two looks.
func (t *Table) blocked(ctx context.Context, target string) (host.MountHealth, error) {
	uses, err := t.Users(ctx, target)
	if err != nil {
		return "", err
	}
	waits := func(u host.Use) bool { return u.PID > 0 && t.waitsForServer(u.PID) }
	i := slices.IndexFunc(uses, waits)
	if i < 0 || !clock.Sleep(ctx, sampleApart) || !waits(uses[i]) {
		return "", nil
	}
	return host.MountHung, nil
}

func (t *Table) waitsForServer(pid int) bool {
	if t.state(pid) != 'D' {
		return false
	}
	b, err := os.ReadFile(filepath.Join(t.cfg.Proc, strconv.Itoa(pid), "wchan"))
	return err == nil && slices.ContainsFunc(blockedIn, func(part string) bool { return strings.Contains(string(b), part) })
}

// AbortFuse implements host.Unmounter.
func (t *Table) AbortFuse(ctx context.Context, target string) error {
	table, err := t.Mounts(ctx)
	if err != nil {
		return err
	}
	m, ok := At(table, target)
	if !ok || !isFuse(m) {
		return nil
	}
	if err := crash.Fault("host.fuse.abort.before"); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(t.connection(m), "abort"), []byte("1"), 0o200); err != nil {
		return fmt.Errorf("end the connection of %s to its daemon: %w", target, err)
	}
	return crash.Fault("host.fuse.abort.after")
}

// ModuleKnown implements host.Facts.
func (t *Table) ModuleKnown(ctx context.Context, name string) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, fmt.Errorf("look for module %s: %w", name, err)
	}
	same := func(name string) string { return strings.ReplaceAll(name, "-", "_") }
	if _, err := os.Stat(filepath.Join(t.cfg.Sys, "module", same(name))); err == nil {
		return true, nil
	}
	dir, err := t.modules()
	if err != nil {
		return false, fmt.Errorf("look for module %s: %w", name, err)
	}
	for _, file := range []string{"modules.dep", "modules.builtin"} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			continue // no modules can be loaded
		}
		for line := range strings.Lines(string(b)) {
			module, _, _ := strings.Cut(strings.TrimSpace(line), ":")
			module, _, _ = strings.Cut(filepath.Base(module), ".ko")
			if same(module) == same(name) {
				return true, nil
			}
		}
	}
	return false, nil
}
