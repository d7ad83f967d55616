package hosttest

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/tasks/host"
)

const unitDir = "/etc/systemd/system"

// writeUnit writes a unit file, and takes unit and file away when the test ends.
func (e suite) writeUnit(t *testing.T, h host.Host, name, text string) {
	t.Helper()
	must(t, h.WriteFile(t.Context(), path.Join(unitDir, name), host.File{Data: []byte(text), Mode: 0o644}))
	undo(t, func(ctx context.Context) error {
		return errors.Join(h.StopUnit(ctx, name), h.SetUnitEnabled(ctx, name, false),
			h.RemoveFile(ctx, path.Join(unitDir, name)), h.Reload(ctx))
	})
}

func (e suite) services(t *testing.T) {
	h, ctx := e.host(t), t.Context()
	name := "mwtest-" + e.tag + ".service"
	if st, err := h.Unit(ctx, name); err != nil || st.Load != "not-found" || st.Active != "inactive" {
		t.Errorf("Unit before = %+v, %v", st, err)
	}
	if err := h.StartUnit(ctx, name); !errors.Is(err, host.ErrNoUnit) {
		t.Errorf("start of no unit: %v", err)
	}
	must(t, h.StopUnit(ctx, name))
	must(t, h.SetUnitEnabled(ctx, name, false))
	e.writeUnit(t, h, name, "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n")
	if st, err := h.Unit(ctx, name); err != nil || st.Load != "loaded" || st.Enabled != "disabled" || st.Fragment != path.Join(unitDir, name) {
		t.Errorf("Unit with a file = %+v, %v", st, err)
	}
	for range 2 {
		must(t, h.SetUnitEnabled(ctx, name, true))
		must(t, h.StartUnit(ctx, name))
	}
	if st, err := h.Unit(ctx, name); err != nil || st.Active != "active" || st.Enabled != "enabled" || st.Result != "success" || !st.ConditionMet {
		t.Errorf("Unit after start = %+v, %v", st, err)
	}
	for range 2 {
		must(t, h.StopUnit(ctx, name))
		must(t, h.SetUnitEnabled(ctx, name, false))
	}
	if st, err := h.Unit(ctx, name); err != nil || st.Active != "inactive" || st.Enabled != "disabled" {
		t.Errorf("Unit after stop = %+v, %v", st, err)
	}
	bad := "mwtest-bad-" + e.tag + ".service"
	e.writeUnit(t, h, bad, "[Service]\nType=oneshot\nExecStart=/bin/false\n")
	if err := h.StartUnit(ctx, bad); !errors.Is(err, host.ErrJob) {
		t.Errorf("start of a unit that fails: %v", err)
	}
	if st, err := h.Unit(ctx, bad); err != nil || st.Active != "failed" || st.Result != "exit-code" {
		t.Errorf("Unit after a failure = %+v, %v", st, err)
	}
	must(t, h.StopUnit(ctx, bad))
	if st, err := h.Unit(ctx, bad); err != nil || st.Active != "inactive" {
		t.Errorf("Unit after a failure and a stop = %+v, %v", st, err)
	}
}

func (e suite) reload(t *testing.T) {
	h, ctx := e.host(t), t.Context()
	name := "mwtest-reload-" + e.tag + ".service"
	unit := "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
	e.writeUnit(t, h, name, unit)
	must(t, h.StartUnit(ctx, name))
	dropIn := path.Join(unitDir, name+".d", "x.conf")
	must(t, h.MakeDir(ctx, path.Dir(dropIn), 0o755))
	must(t, h.WriteFile(ctx, dropIn, host.File{Data: []byte("[Service]\nTimeoutSec=7\n"), Mode: 0o644}))
	undo(t, func(ctx context.Context) error {
		return errors.Join(h.RemoveFile(ctx, dropIn), h.RemoveDir(ctx, path.Dir(dropIn)))
	})
	if st, err := h.Unit(ctx, name); err != nil || !st.NeedReload {
		t.Errorf("Unit with a new drop-in = %+v, %v", st, err)
	}
	must(t, h.Reload(ctx))
	if st, err := h.Unit(ctx, name); err != nil || st.NeedReload || fmt.Sprint(st.DropIns) != "["+dropIn+"]" || st.Active != "active" {
		t.Errorf("Unit after a reload = %+v, %v", st, err)
	}
}

// mountUnit returns a mount unit and its name.
func mountUnit(where, what, fstype, options string) (name, text string) {
	var b strings.Builder
	for i, c := range []byte(strings.TrimPrefix(where, "/")) {
		switch {
		case c == '/':
			b.WriteByte('-')
		case c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '.' && i > 0:
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, `\x%02x`, c)
		}
	}
	return b.String() + ".mount", fmt.Sprintf("[Mount]\nWhat=%s\nWhere=%s\nType=%s\nOptions=%s\nTimeoutSec=10\n[Install]\nWantedBy=remote-fs.target\n",
		what, where, fstype, options)
}

// mount mounts by a unit, and leaves nothing of it when the test ends.
func (e suite) mount(t *testing.T, h host.Host, where, what, fstype, options string) (name string) {
	t.Helper()
	must(t, h.MakeDir(t.Context(), where, 0o755))
	undo(t, func(ctx context.Context) error { return h.RemoveDir(ctx, where) })
	name, text := mountUnit(where, what, fstype, options)
	e.writeUnit(t, h, name, text)
	must(t, h.StartUnit(t.Context(), name))
	return name
}

// mountAt returns the mounts at a mount point.
func mountsAt(t *testing.T, h host.Reader, where string) []host.Mount {
	t.Helper()
	table, err := h.Mounts(t.Context())
	must(t, err)
	var out []host.Mount
	for _, m := range table {
		if m.Target == where {
			out = append(out, m)
		}
	}
	return out
}

func (e suite) bindMount(t *testing.T) {
	h, ctx, src, where := e.host(t), t.Context(), e.path("src-dir"), e.path("bind")
	must(t, h.MakeDir(ctx, src, 0o755))
	must(t, h.WriteFile(ctx, path.Join(src, "f"), host.File{Data: []byte("through"), Mode: 0o644}))
	undo(t, func(ctx context.Context) error {
		return errors.Join(h.RemoveFile(ctx, path.Join(src, "f")), h.RemoveDir(ctx, src))
	})
	name := e.mount(t, h, where, src, "none", "bind,nofail")
	must(t, h.StartUnit(ctx, name))
	ms := mountsAt(t, h, where)
	if len(ms) != 1 || path.Base(ms[0].Root) != "src-dir" || ms[0].ReadOnly() || ms[0].Dev == "" || ms[0].FSType == "" {
		t.Fatalf("mounts = %+v", ms)
	}
	if f, err := h.ReadFile(ctx, path.Join(where, "f")); err != nil || string(f.Data) != "through" {
		t.Errorf("ReadFile through the mount = %q, %v", f.Data, err)
	}
	must(t, h.ProbeWrite(ctx, where))
	if err := h.RemoveDir(ctx, where); err == nil {
		t.Error("a mount point was removed")
	}
	if st, err := h.Unit(ctx, name); err != nil || st.Active != "active" || st.Sub != "mounted" {
		t.Errorf("Unit = %+v, %v", st, err)
	}
	e.busy(t, h, name, where)
	for range 2 {
		must(t, h.StopUnit(ctx, name))
	}
	if ms := mountsAt(t, h, where); len(ms) > 0 {
		t.Errorf("mounts after the stop = %+v", ms)
	}
}

func (e suite) busy(t *testing.T, h host.Host, name, where string) {
	t.Helper()
	ctx := t.Context()
	pid, release := e.Occupy(t, where)
	defer release()
	uses, err := h.Users(ctx, where)
	if err != nil || len(uses) == 0 || uses[0].PID != pid || uses[0].Command == "" || uses[0].How == "" {
		t.Errorf("Users = %+v, %v, want process %d", uses, err, pid)
	}
	err = h.StopUnit(ctx, name)
	if !errors.Is(err, host.ErrBusy) {
		t.Fatalf("stop of a busy mount: %v", err)
	}
	if !strings.Contains(err.Error(), fmt.Sprint(pid)) {
		t.Errorf("%v: does not name process %d", err, pid)
	}
	if len(mountsAt(t, h, where)) != 1 {
		t.Error("the busy mount is gone")
	}
}

func (e suite) readOnlyMount(t *testing.T) {
	h, ctx, src, where := e.host(t), t.Context(), e.path("ro-src"), e.path("ro")
	must(t, h.MakeDir(ctx, src, 0o755))
	undo(t, func(ctx context.Context) error { return h.RemoveDir(ctx, src) })
	e.mount(t, h, where, src, "none", "bind,ro")
	if ms := mountsAt(t, h, where); len(ms) != 1 || !ms[0].ReadOnly() {
		t.Errorf("mounts = %+v", ms)
	}
	must(t, h.ProbeRead(ctx, where))
	if err := h.ProbeWrite(ctx, where); err == nil {
		t.Error("a write to a read-only mount succeeded")
	}
}

func (e suite) tmpfs(t *testing.T) {
	h, ctx, where := e.host(t), t.Context(), e.path("tmp-fs")
	name := e.mount(t, h, where, "tmpfs", "tmpfs", "nofail,size=5000,mode=0750")
	ms := mountsAt(t, h, where)
	if len(ms) != 1 || ms[0].FSType != "tmpfs" || ms[0].Source != "tmpfs" || ms[0].Root != "/" {
		t.Fatalf("mounts = %+v", ms)
	}
	super := strings.Join(ms[0].Super, ",")
	if !strings.Contains(super, "size=8k") && !strings.Contains(super, "size=64k") || !strings.Contains(super, "mode=750") {
		t.Errorf("options of the file system = %s", super)
	}
	if c, err := h.ProbeCapacity(ctx, where); err != nil || c.TotalBytes < 5000 || c.TotalBytes > 5000+64<<10 {
		t.Errorf("ProbeCapacity = %+v, %v", c, err)
	}
	must(t, h.SetUnitEnabled(ctx, name, true))
	if st, err := h.Unit(ctx, name); err != nil || st.Enabled != "enabled" {
		t.Errorf("Unit = %+v, %v", st, err)
	}
}

func (e suite) failingMount(t *testing.T) {
	h, ctx, where := e.host(t), t.Context(), e.path("bad")
	must(t, h.MakeDir(ctx, where, 0o755))
	undo(t, func(ctx context.Context) error { return h.RemoveDir(ctx, where) })
	// A missing source of a bind mount would not do: systemd makes it.
	name, text := mountUnit(where, "none", "nosuchfs", "nofail")
	e.writeUnit(t, h, name, text)
	if err := h.StartUnit(ctx, name); !errors.Is(err, host.ErrJob) {
		t.Errorf("start of a mount that the kernel does not know: %v", err)
	}
	if ms := mountsAt(t, h, where); len(ms) > 0 {
		t.Errorf("mounts = %+v", ms)
	}
	must(t, h.StopUnit(ctx, name))
	if st, err := h.Unit(ctx, name); err != nil || st.Active != "inactive" {
		t.Errorf("Unit after the stop = %+v, %v", st, err)
	}
}
