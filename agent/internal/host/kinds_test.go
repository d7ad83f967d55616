//go:build millwright_node

package nodehost_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/host"
)

// kindsNode carries out specs on the real node, without a journal.
type kindsNode struct {
	t   *testing.T
	h   host.Host
	reg *tasks.Registry
}

func (k kindsNode) plan(kind string, spec proto.Message) *taskv1.Plan {
	k.t.Helper()
	info, err := k.reg.Kind(kind)
	must(k.t, err)
	must(k.t, info.Validate(spec))
	p, err := k.reg.Plan(k.t.Context(), k.h, info, spec)
	must(k.t, err)
	return p
}

// differences renders those of a plan.
func differences(p *taskv1.Plan) string {
	var lines []string
	for _, d := range p.GetDifferences() {
		lines = append(lines, fmt.Sprintf("%s: %q, want %q", d.GetSubject(), d.GetHave(), d.GetWant()))
	}
	return strings.Join(lines, "\n")
}

// run carries out the steps up to the first that fails, and undoes them all when
// one does or when undo is set.
func (k kindsNode) run(kind string, spec proto.Message, undo bool) error {
	k.t.Helper()
	info, err := k.reg.Kind(kind)
	must(k.t, err)
	var steps []tasks.Step
	var befores [][]byte
	var failure error
	for _, sealed := range k.plan(kind, spec).GetSteps() {
		s, err := k.reg.Open(sealed)
		must(k.t, err)
		before, err := s.Observe(k.t.Context(), k.h)
		must(k.t, err)
		steps, befores = append(steps, s), append(befores, before)
		if _, failure = s.Apply(k.t.Context(), k.h); failure != nil {
			break
		}
		must(k.t, s.Verify(k.t.Context(), k.h))
	}
	if failure == nil && !undo {
		must(k.t, info.Verify(k.t.Context(), k.h, spec))
		if p := k.plan(kind, spec); len(p.GetSteps()) > 0 || len(p.GetDifferences()) > 0 {
			k.t.Errorf("a second run of %s plans %d steps:\n%s", kind, len(p.GetSteps()), differences(p))
		}
		return nil
	}
	for i := len(steps) - 1; i >= 0; i-- {
		must(k.t, steps[i].Undo(k.t.Context(), k.h, befores[i]))
	}
	return failure
}

// traces is all that a mount unit leaves on a machine.
func (k kindsNode) traces(target, unit string) string {
	k.t.Helper()
	out := ""
	for _, args := range [][]string{
		{"sh", "-c", "grep ' " + target + " ' /proc/self/mountinfo | cut -d' ' -f4,5,6,9,10"},
		{"sh", "-c", "ls -d " + target + " /etc/systemd/system/" + strings.ReplaceAll(unit, `\`, `\\`) + "* /etc/systemd/system/*.wants/* 2>/dev/null"},
		{"systemctl", "show", "-P", "ActiveState", unit},
		{"systemctl", "show", "-P", "LoadState", unit},
	} {
		b, _ := exec.Command(args[0], args[1:]...).Output() // grep finds nothing, or ls
		out += string(b)
	}
	return out
}

func shell(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v %s", script, err, out)
	}
}

func newKindsNode(t *testing.T) kindsNode {
	needNode(t)
	return kindsNode{t, newHost(t), all.Registry()}
}

// mountSpecs are what the node is asked to mount. GlusterFS is among them where
// the environment names a volume as SERVER:VOLUME.
func mountSpecs(t *testing.T, target string) map[string]*storagev1.MountSpec {
	t.Helper()
	src := "/srv/mwtest-src"
	must(t, os.MkdirAll(src, 0o755))
	specs := map[string]*storagev1.MountSpec{
		"bind":  {Target: target, Source: &storagev1.MountSpec_Bind{Bind: &storagev1.BindSource{Path: src}}},
		"tmpfs": {Target: target, Source: &storagev1.MountSpec_Tmpfs{Tmpfs: &storagev1.TmpfsSource{SizeBytes: 5000, Mode: "1777"}}},
	}
	if server, volume, ok := strings.Cut(os.Getenv("MILLWRIGHT_TEST_VOLUME"), ":"); ok {
		specs["glusterfs"] = &storagev1.MountSpec{Target: target, Source: &storagev1.MountSpec_Glusterfs{
			Glusterfs: &storagev1.GlusterfsSource{Servers: []string{server}, Volume: volume},
		}}
		specs["glusterfs second server"] = &storagev1.MountSpec{Target: target, Source: &storagev1.MountSpec_Glusterfs{
			Glusterfs: &storagev1.GlusterfsSource{Servers: []string{"127.0.0.1", server}, Volume: volume},
		}}
	}
	return specs
}

// TestMountKinds mounts, finds each drift and puts it right, and unmounts, on a
// machine with systemd.
func TestMountKinds(t *testing.T) {
	const target, unit = "/mnt/mw-test/data", `mnt-mw\x2dtest-data.mount`
	needNode(t)
	for name, spec := range mountSpecs(t, target) {
		t.Run(name, func(t *testing.T) {
			k := newKindsNode(t)
			t.Cleanup(func() {
				shell(t, "while mountpoint -q "+target+"; do umount -l "+target+"; done; rm -rf "+target+` /etc/systemd/system/mnt-mw*data.mount*; systemctl daemon-reload`)
			})
			shell(t, "mkdir -p /mnt/mw-test; rmdir "+target+" 2>/dev/null || true")
			was := k.traces(target, unit)
			must(t, k.run("storage.mount", spec, true))
			if now := k.traces(target, unit); now != was {
				t.Fatalf("an undone mount left\n%s\nof\n%s", now, was)
			}
			must(t, k.run("storage.mount", spec, false))
			k.drifts(spec, target, unit)
			k.busy(target)
			must(t, k.run("storage.unmount", &storagev1.UnmountSpec{Target: target}, true))
			if p := k.plan("storage.mount", spec); len(p.GetSteps()) > 0 {
				t.Errorf("an undone unmount left\n%s", differences(p))
			}
			must(t, k.run("storage.unmount", &storagev1.UnmountSpec{Target: target}, false))
			shell(t, "rmdir "+target)
			if now := k.traces(target, unit); now != was {
				t.Errorf("the kinds left\n%s\nof\n%s", now, was)
			}
		})
	}
}

// TestMountKindFails checks that a mount that does not come up is undone, with
// the processes that its client has left.
func TestMountKindFails(t *testing.T) {
	const target, unit = "/mnt/mw-test/none", `mnt-mw\x2dtest-none.mount`
	k := newKindsNode(t)
	server, _, ok := strings.Cut(os.Getenv("MILLWRIGHT_TEST_VOLUME"), ":")
	if !ok {
		server = "127.0.0.1"
	}
	if _, err := exec.LookPath("mount.glusterfs"); err != nil {
		t.Fatal("the client of GlusterFS is not installed")
	}
	was := k.traces(target, unit)
	err := k.run("storage.mount", &storagev1.MountSpec{Target: target, Source: &storagev1.MountSpec_Glusterfs{
		Glusterfs: &storagev1.GlusterfsSource{Servers: []string{server}, Volume: "no-such-volume"},
	}}, false)
	if !errors.Is(err, host.ErrJob) {
		t.Errorf("mount of a volume that is not there: %v", err)
	}
	t.Logf("it says: %v", err)
	if now := k.traces(target, unit); now != was {
		t.Errorf("the mount left\n%s\nof\n%s", now, was)
	}
	if out, err := exec.Command("pgrep", "-af", "volfile-id=/no-such-volume").Output(); err == nil {
		t.Errorf("the mount left processes: %s", out)
	}
}

func (k kindsNode) drifts(spec *storagev1.MountSpec, target, unit string) {
	k.t.Helper()
	file := "/etc/systemd/system/" + strings.ReplaceAll(unit, `\`, `\\`)
	for _, d := range []struct{ script, want string }{
		{"mount -o remount,bind,ro " + target, `mount ` + target + ` option: "ro", want "rw"`},
		{"umount " + target, `mount ` + target + `: "", want `},
		{"systemctl disable -q " + strings.ReplaceAll(unit, `\`, `\\`), `unit ` + unit + ` at boot: "disabled", want "enabled"`},
		{"sed -i s/TimeoutSec=30/TimeoutSec=31/ " + file, `unit ` + unit + ` Mount.TimeoutSec: "31", want "30"`},
		{"mkdir -p " + file + ".d; printf '[Unit]\\nDescription=x\\n' > " + file + ".d/x.conf", `unit ` + unit + ` drop-in: ` + strconv.Quote("/etc/systemd/system/"+unit+".d/x.conf") + `, want ""`},
		{"umount " + target + "; mount -t tmpfs other " + target, `source: "other", want `},
		{"mount -t tmpfs other " + target, `mount ` + target + ` stack: "2 mounts", want "1 mount"`},
	} {
		shell(k.t, d.script)
		p := k.plan("storage.mount", spec)
		if got := differences(p); !strings.Contains(got, d.want) {
			k.t.Errorf("after %s the plan names\n%s\nwant\n%s", d.script, got, d.want)
		}
		must(k.t, k.run("storage.mount", spec, false))
	}
	shell(k.t, "rmdir "+file+".d")
}

// busy checks that a mount in use stays, and that who uses it is named.
func (k kindsNode) busy(target string) {
	k.t.Helper()
	pid, release := occupy(k.t, target)
	defer release()
	err := k.run("storage.unmount", &storagev1.UnmountSpec{Target: target}, false)
	var reason *tasks.ReasonError
	if !errors.As(err, &reason) || reason.Reason != tasks.ReasonBusy || !errors.Is(err, host.ErrBusy) {
		k.t.Fatalf("unmount of a busy mount: %v", err)
	}
	for _, want := range []string{fmt.Sprint(pid), "sleep"} {
		if !strings.Contains(err.Error(), want) {
			k.t.Errorf("%v: does not name %q", err, want)
		}
	}
	p := k.plan("storage.unmount", &storagev1.UnmountSpec{Target: target})
	if got := differences(p); !strings.Contains(got, "mount "+target) {
		k.t.Errorf("the busy mount is gone: %s", got)
	}
}
