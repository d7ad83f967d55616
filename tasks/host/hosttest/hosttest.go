// Package hosttest is what every implementation of package host must pass: the
// node in memory, and the real one with systemd.
package hosttest

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"path"
	"testing"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// Env is the node under test.
type Env struct {
	// ForStep returns the host of a step; the same step has the same command.
	ForStep func(taskID string, step uint32) host.Host
	// Prober returns a host for checks.
	Prober func() host.Prober
	// Dir is an empty directory on a local file system, below which the suite
	// makes files and mounts. It is clean and has no symbolic link in it.
	Dir string
	// Link makes a symbolic link.
	Link func(t testing.TB, target, link string)
	// Occupy keeps a directory in use by a process until it is released.
	Occupy func(t testing.TB, dir string) (pid int, release func())
	// Started returns how often the command argv was started, which appends a
	// line to file each time it runs.
	Started func(t testing.TB, argv []string, file string) int
	// Image returns an OCI archive with one image, outside Dir, and its digest.
	// The image has a program /program: with the argument run it runs until it
	// gets SIGTERM; with exit and a number it writes last words to its standard
	// error and ends with that code.
	Image func(t testing.TB) (archive, digest string)
	// Packages is what there is to install.
	Packages Packages
	// Slurm makes the machine an idle node that stands in the slurm.conf of a
	// controller, and takes it away when the test ends.
	Slurm func(t testing.TB) host.SlurmRef
}

// Run puts a node to the suite. It leaves the node as it found it.
func Run(t *testing.T, env Env) {
	e := suite{Env: env, tag: tag(env.Dir)}
	t.Run("files", e.files)
	t.Run("directories", e.directories)
	t.Run("links", e.links)
	t.Run("facts", e.facts)
	t.Run("probes", e.probes)
	t.Run("services", e.services)
	t.Run("reload", e.reload)
	t.Run("bind mount", e.bindMount)
	t.Run("read-only bind mount", e.readOnlyMount)
	t.Run("tmpfs", e.tmpfs)
	t.Run("mount that fails", e.failingMount)
	t.Run("command", e.command)
	t.Run("command that fails", e.failingCommand)
	t.Run("command that cannot start", e.noProgram)
	t.Run("command that is stopped", e.stoppedCommand)
	t.Run("container", e.containers)
	t.Run("container that ends", e.endingContainer)
	t.Run("image archive", e.archives)
	RunPackages(t, env)
	t.Run("slurm", e.slurm)
}

type suite struct {
	Env
	tag string
}

// tag tells the units of one run from those of another.
func tag(s string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(s))
	return fmt.Sprintf("%08x", h.Sum32())
}

// host returns a host for a step that no other part of the suite uses.
func (e suite) host(t testing.TB) host.Host { return e.ForStep(e.taskID(t), 0) }

func (e suite) taskID(t testing.TB) string {
	return fmt.Sprintf("01890000-0000-7000-8000-%s%s", e.tag, tag(t.Name())[:4])
}

func (e suite) path(parts ...string) string {
	return path.Join(append([]string{e.Dir}, parts...)...)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// undo runs f when the test ends, with a context that is still good.
func undo(t testing.TB, f func(context.Context) error) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := f(ctx); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
}

func (e suite) files(t *testing.T) {
	h, ctx, p := e.host(t), t.Context(), e.path("file")
	undo(t, func(ctx context.Context) error { return h.RemoveFile(ctx, p) })
	if _, err := h.ReadFile(ctx, p); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("read of a missing file: %v", err)
	}
	must(t, h.RemoveFile(ctx, p))
	for _, f := range []host.File{{Data: []byte("one\x00\n"), Mode: 0o600}, {Data: []byte("two"), Mode: 0o644}, {Data: []byte("two"), Mode: 0o644}} {
		must(t, h.WriteFile(ctx, p, f))
		got, err := h.ReadFile(ctx, p)
		if err != nil || string(got.Data) != string(f.Data) || got.Mode.Perm() != f.Mode {
			t.Errorf("ReadFile = %q %v, %v, want %q %v", got.Data, got.Mode, err, f.Data, f.Mode)
		}
	}
	if info, err := h.Lstat(ctx, p); err != nil || !info.Mode.IsRegular() || info.Mode.Perm() != 0o644 || info.Size != 3 {
		t.Errorf("Lstat = %+v, %v", info, err)
	}
	if err := h.WriteFile(ctx, e.path("none", "file"), host.File{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("write below a missing directory: %v", err)
	}
	if err := h.WriteFile(ctx, e.Dir, host.File{}); err == nil {
		t.Error("a directory was replaced by a file")
	}
	if _, err := h.ReadFile(ctx, e.Dir); err == nil {
		t.Error("a directory was read as a file")
	}
	for range 2 {
		must(t, h.RemoveFile(ctx, p))
	}
	if _, err := h.Lstat(ctx, p); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Lstat of a removed file: %v", err)
	}
}

func (e suite) directories(t *testing.T) {
	h, ctx, p := e.host(t), t.Context(), e.path("dir")
	if _, err := h.ReadDir(ctx, p); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("list of a missing directory: %v", err)
	}
	if err := h.MakeDir(ctx, path.Join(p, "deep"), 0o755); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("make a directory below a missing one: %v", err)
	}
	for range 2 {
		must(t, h.MakeDir(ctx, p, 0o750))
	}
	undo(t, func(ctx context.Context) error { return h.RemoveDir(ctx, p) })
	if info, err := h.Lstat(ctx, p); err != nil || !info.Mode.IsDir() || info.Mode.Perm() != 0o750 {
		t.Errorf("Lstat = %+v, %v", info, err)
	}
	if empty, err := h.DirEmpty(ctx, p); err != nil || !empty {
		t.Errorf("DirEmpty = %v, %v", empty, err)
	}
	for _, name := range []string{"b", "a"} {
		must(t, h.WriteFile(ctx, path.Join(p, name), host.File{Mode: 0o600}))
	}
	if names, err := h.ReadDir(ctx, p); err != nil || fmt.Sprint(names) != "[a b]" {
		t.Errorf("ReadDir = %v, %v", names, err)
	}
	if empty, err := h.DirEmpty(ctx, p); err != nil || empty {
		t.Errorf("DirEmpty = %v, %v", empty, err)
	}
	if err := h.RemoveDir(ctx, p); err == nil {
		t.Error("a directory with files was removed")
	}
	if err := h.MakeDir(ctx, path.Join(p, "a"), 0o755); err == nil {
		t.Error("a file passed as a directory")
	}
	for _, name := range []string{"a", "b"} {
		must(t, h.RemoveFile(ctx, path.Join(p, name)))
	}
	for range 2 {
		must(t, h.RemoveDir(ctx, p))
	}
}

func (e suite) links(t *testing.T) {
	h, ctx, p := e.host(t), t.Context(), e.path("link")
	must(t, h.WriteFile(ctx, e.path("target"), host.File{Data: []byte("x"), Mode: 0o600}))
	e.Link(t, "target", p)
	undo(t, func(ctx context.Context) error {
		return errors.Join(h.RemoveFile(ctx, p), h.RemoveFile(ctx, e.path("target")))
	})
	if info, err := h.Lstat(ctx, p); err != nil || info.Mode&fs.ModeSymlink == 0 || info.Target != "target" {
		t.Errorf("Lstat = %+v, %v", info, err)
	}
	must(t, h.RemoveFile(ctx, p))
	if _, err := h.Lstat(ctx, e.path("target")); err != nil {
		t.Errorf("the target of a removed link: %v", err)
	}
}

func (e suite) facts(t *testing.T) {
	h, ctx := e.Prober(), t.Context()
	if id, err := h.BootID(ctx); err != nil || len(id) != 36 {
		t.Errorf("BootID = %q, %v", id, err)
	}
	if p, err := h.FindProgram(ctx, "sh"); err != nil || path.Base(p) != "sh" {
		t.Errorf("FindProgram(sh) = %q, %v", p, err)
	}
	if _, err := h.FindProgram(ctx, "no-such-program"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("FindProgram(no-such-program): %v", err)
	}
	for name, want := range map[string]bool{"root": true, "no-such-user": false} {
		if got, err := h.UserExists(ctx, name); err != nil || got != want {
			t.Errorf("UserExists(%q) = %v, %v", name, got, err)
		}
	}
	for name, want := range map[string]bool{"tmpfs": true, "nosuchfs": false} {
		if got, err := h.FilesystemKnown(ctx, name); err != nil || got != want {
			t.Errorf("FilesystemKnown(%q) = %v, %v", name, got, err)
		}
	}
}

func (e suite) probes(t *testing.T) {
	h, ctx := e.Prober(), t.Context()
	must(t, h.ProbeWrite(ctx, e.Dir))
	must(t, h.ProbeRead(ctx, e.Dir))
	if c, err := h.ProbeCapacity(ctx, e.Dir); err != nil || c.TotalBytes == 0 || c.FreeBytes > c.TotalBytes {
		t.Errorf("ProbeCapacity = %+v, %v", c, err)
	}
	for name, probe := range map[string]func(context.Context, string) error{"write": h.ProbeWrite, "read": h.ProbeRead} {
		if err := probe(ctx, e.path("none")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("probe %s of a missing directory: %v", name, err)
		}
	}
	if empty, err := h.DirEmpty(ctx, e.Dir); err != nil || !empty {
		t.Errorf("after the probes: DirEmpty = %v, %v", empty, err)
	}
}
