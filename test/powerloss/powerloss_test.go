package powerloss_test

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/powerloss"
)

// least is how many images of each program must have been looked at.
const least = 1000

// TestPowerLoss records the whole product once, and cuts the power of the agent
// and of the server after every system call.
func TestPowerLoss(t *testing.T) {
	judges := build(t)
	dir, remove, err := powerloss.MemoryDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := remove(); err != nil {
			t.Error(err)
		}
	})
	s := prepare(t, record(t), judges, dir)
	t.Logf("promises: %v", s.kinds)
	for _, kind := range []string{
		"frame sent", "joined with a key", "command started", "command ended", "mount made",
		"node joined", "frame acknowledged", "output acknowledged", "founded", "task created",
	} {
		if s.kinds[kind] == 0 {
			t.Errorf("nothing was promised of the kind %q: the recording shows nothing about it", kind)
		}
	}
	t.Run("agent", func(t *testing.T) { cut(t, s.agent, dir) })
	t.Run("server", func(t *testing.T) { cut(t, s.server, dir) })
	t.Run("the replay can fail", func(t *testing.T) {
		for name, r := range map[string]*powerloss.Replay{"agent": s.agent, "server": s.server} {
			control(t, name+", file syncs ignored", *r, dir, func(r *powerloss.Replay) { r.IgnoreFileSync = true })
			control(t, name+", directory syncs ignored", *r, dir, func(r *powerloss.Replay) { r.IgnoreDirSync = true })
		}
	})
}

func cut(t *testing.T, r *powerloss.Replay, dir string) {
	report, err := r.Run(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(report)
	if report.Bad > 0 {
		t.Errorf("power loss leaves bad images: %s", report)
		for _, first := range report.First {
			t.Log(first)
		}
	}
	if report.Distinct < least {
		t.Errorf("%d images were looked at, want %d: the recording is too small", report.Distinct, least)
	}
}

// control runs the replay on a disk that ignores what programs rely on.
func control(t *testing.T, name string, r powerloss.Replay, dir string, worse func(*powerloss.Replay)) {
	worse(&r)
	r.Enough = 100
	r.Modes = []powerloss.Mode{powerloss.Nothing, powerloss.Some, powerloss.Torn}
	report, err := r.Run(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %s", name, report)
	if report.Bad == 0 {
		t.Errorf("%s: no image is bad, so that the replay proves nothing", name)
	}
}

// build makes the programs that judge images.
func build(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, pkg := range map[string]string{"agent": "./agent/internal/verdict", "server": "./controlplane/internal/verdict"} {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, name), pkg)
		cmd.Dir = clustertest.Root(t)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", pkg, err, out)
		}
	}
	return dir
}
