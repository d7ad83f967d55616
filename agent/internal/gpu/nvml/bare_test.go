//go:build cgo

package nvml

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/gpu/gputest"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// bare builds the library that has next to nothing.
func bare(t *testing.T, flags ...string) string {
	t.Helper()
	lib := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	out, err := exec.CommandContext(t.Context(), "gcc", append(flags, "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", lib, "testdata/bare.c")...).CombinedOutput()
	if err != nil {
		t.Fatalf("build library: %v\n%s", err, out)
	}
	return lib
}

// TestMain makes the test binary a program without the guard.
func TestMain(m *testing.M) {
	if lib := os.Getenv("UNGUARDED"); lib != "" {
		api := gonvml.New(gonvml.WithLibraryPath(lib))
		defer func() { recover(); os.Exit(4) }() //nolint:errcheck // it is never reached
		if api.Init() != gonvml.SUCCESS {
			os.Exit(3)
		}
		if _, ret := api.DeviceGetHandleByIndex(0); ret != gonvml.SUCCESS {
			os.Exit(3)
		}
		_, _ = api.SystemGetDriverVersion()
		os.Exit(5)
	}
	os.Exit(m.Run())
}

// TestUnguarded shows the trap that the table is there for: go-nvml's call of a
// function that the library lacks ends the process, past every recover.
func TestUnguarded(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), "UNGUARDED="+bare(t))
	out, _ := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != 127 || !strings.Contains(string(out), "undefined symbol: nvmlSystemGetDriverVersion") {
		t.Errorf("exit code %d, %s: go-nvml has changed, and the guard may have become needless", cmd.ProcessState.ExitCode(), out)
	}
}

// TestBare asks everything of a library that has seven functions: each value is
// known or named with the reason, and the process lives.
func TestBare(t *testing.T) {
	l := New(clock.System{})
	n, err := l.Start(bare(t))
	if err != nil || n != 2 {
		t.Fatalf("%d GPUs, %v", n, err)
	}
	inv, err := l.Inventory()
	if err != nil {
		t.Fatal(err)
	}
	gputest.Whole(t, inv)
	if len(inv.GetMissingFunctions()) < 40 || len(inv.GetGpus()) != 2 || inv.GetGpus()[1].GetUuid() != "GPU-2" || inv.GetGpus()[1].GetPciBusId() != "0000:c6:00.0" {
		t.Errorf("inventory %v", inv)
	}
	for _, u := range inv.GetGpus()[0].GetUnknown() {
		if u.GetReason() != gpuv1.UnknownReason_UNKNOWN_REASON_SYMBOL_MISSING || u.GetCode() != 0 || !strings.HasPrefix(u.GetFunction(), "nvmlDevice") {
			t.Errorf("unknown %v", u)
		}
	}
	for _, tier := range []gpuv1.Tier{gpuv1.Tier_TIER_FAST, gpuv1.Tier_TIER_SLOW} {
		before := l.Calls()
		s, err := l.Sample(tier)
		if err != nil {
			t.Fatal(err)
		}
		if len(s.GetGpus()) != 2 || s.GetGpus()[0].GetGpuCelsius() != 40 || s.GetCount() != 2 {
			t.Errorf("sample %v", s)
		}
		if got := l.Calls() - before; got != 3 {
			t.Errorf("%v: %d calls of a library that has 3 of the functions", tier, got)
		}
		if tier == gpuv1.Tier_TIER_SLOW {
			gputest.Whole(t, s)
		}
	}
	if ev, err := l.Wait(1); err != nil || len(ev) != 0 {
		t.Errorf("events %v, %v", ev, err)
	}
}
