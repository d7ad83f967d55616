package hosttest

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// container is one whose program does what args say.
func (e suite) container(digest, record string, args ...string) host.Container {
	return host.Container{
		Name: "mwtest-" + e.tag, Image: digest, Argv: append([]string{"/program"}, args...),
		MemoryBytes: 64 << 20, CPUMillis: 500, StopGrace: 5 * time.Second, Record: []byte(record),
	}
}

func (e suite) containers(t *testing.T) {
	h, ctx := e.host(t), t.Context()
	archive, digest := e.Image(t)
	c := e.container(digest, "one", "run")
	if st, err := h.Container(ctx, c.Name); err != nil || st.Exists {
		t.Fatalf("Container before = %+v, %v", st, err)
	}
	must(t, h.RemoveContainer(ctx, c.Name))
	must(t, h.RemoveImage(ctx, digest))
	if err := h.CreateContainer(ctx, c); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("create without an image: %v", err)
	}
	if err := h.StartContainer(ctx, c.Name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("start of no container: %v", err)
	}
	undo(t, func(ctx context.Context) error {
		return errors.Join(h.RemoveContainer(ctx, c.Name), h.RemoveImage(ctx, digest))
	})
	for range 2 {
		must(t, h.ImportImage(ctx, archive, digest))
		must(t, h.CreateContainer(ctx, c))
	}
	gone := c
	gone.Name, gone.Devices = c.Name+"-gone", []string{host.CDIKind + "=MIG-gone"}
	if err := h.CreateContainer(ctx, gone); !errors.Is(err, host.ErrGPUUnknown) {
		t.Errorf("create with a device that is not there: %v", err)
	}
	if st, err := h.Container(ctx, gone.Name); err != nil || st.Exists {
		t.Errorf("Container after that = %+v, %v", st, err)
	}
	if st, err := h.ProbeContainer(ctx, c.Name); err != nil || !st.Exists || !st.Ours || st.Running || string(st.Record) != "one" || st.Image != digest {
		t.Errorf("ProbeContainer of one that was not started = %+v, %v", st, err)
	}
	must(t, h.StartContainer(ctx, c.Name))
	first, err := h.ProbeContainer(ctx, c.Name)
	if err != nil || !first.Running || first.PID == 0 || !strings.Contains(first.ControlGroup, c.Name) {
		t.Fatalf("ProbeContainer = %+v, %v", first, err)
	}
	must(t, h.StartContainer(ctx, c.Name))
	must(t, h.CreateContainer(ctx, c))
	if again, err := h.ProbeContainer(ctx, c.Name); err != nil || again.Process != first.Process {
		t.Errorf("after a second start it is another process: %+v, %v; first %+v", again, err, first)
	}
	if err := h.CreateContainer(ctx, e.container(digest, "two", "run")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("another container with the name: %v", err)
	}
	must(t, h.RemoveImage(ctx, digest))
	if st, err := h.Image(ctx, digest); err != nil || !st.Present || !slices.Equal(st.Users, []string{c.Name}) {
		t.Errorf("Image in use = %+v, %v", st, err)
	}
	for range 2 {
		must(t, h.RemoveContainer(ctx, c.Name))
		must(t, h.RemoveImage(ctx, digest))
	}
	if st, err := h.Image(ctx, digest); err != nil || st.Present || len(st.Users) > 0 {
		t.Errorf("Image after = %+v, %v", st, err)
	}
}

func (e suite) endingContainer(t *testing.T) {
	h, ctx := e.host(t), t.Context()
	archive, digest := e.Image(t)
	c := e.container(digest, "ends", "exit", "3")
	undo(t, func(ctx context.Context) error {
		return errors.Join(h.RemoveContainer(ctx, c.Name), h.RemoveImage(ctx, digest))
	})
	must(t, h.ImportImage(ctx, archive, digest))
	must(t, h.CreateContainer(ctx, c))
	must(t, h.StartContainer(ctx, c.Name))
	st, err := h.ProbeContainer(ctx, c.Name)
	if err != nil || st.Running || st.State != "stopped" || st.ExitCode != 3 || st.OOMKilled || !strings.Contains(strings.Join(st.LastLines, "\n"), "last words") {
		t.Errorf("ProbeContainer = %+v, %v", st, err)
	}
}

func (e suite) archives(t *testing.T) {
	h, ctx := e.host(t), t.Context()
	archive, digest := e.Image(t)
	if got, err := h.ImageArchive(ctx, archive); err != nil || !slices.Equal(got, []string{digest}) {
		t.Errorf("ImageArchive = %q, %v, want %s", got, err, digest)
	}
	if _, err := h.ImageArchive(ctx, e.path("none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ImageArchive of a missing file: %v", err)
	}
	must(t, h.WriteFile(ctx, e.path("rubbish"), host.File{Data: []byte(strings.Repeat("rubbish", 200)), Mode: 0o600}))
	undo(t, func(ctx context.Context) error { return h.RemoveFile(ctx, e.path("rubbish")) })
	if _, err := h.ImageArchive(ctx, e.path("rubbish")); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("ImageArchive of rubbish: %v", err)
	}
	if err := h.ImportImage(ctx, archive, "sha256:"+strings.Repeat("0", 64)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("import of what is not in the archive: %v", err)
	}
}
