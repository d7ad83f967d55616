package gpu_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/gpu"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// program builds the real millwright-gpu, as make gpu-child does.
var program = sync.OnceValues(func() (string, error) {
	path := filepath.Join(os.Getenv(built), "millwright-gpu")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-extldflags=-Wl,-z,lazy", "-o", path, "github.com/gpuaas/millwright/agent/cmd/millwright-gpu")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build millwright-gpu: %w\n%s", err, out)
	}
	return path, nil
})

// real is a Supervisor before the real program and a library built with flags.
func real(t *testing.T, change func(*gpu.Config), flags []string, faults ...string) *bench {
	t.Helper()
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	lib := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	out, err := exec.CommandContext(t.Context(), "gcc", append(flags, "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", lib, "nvml/testdata/bare.c")...).CombinedOutput()
	if err != nil {
		t.Fatalf("build library: %v\n%s", err, out)
	}
	return newBench(t, func(c *gpu.Config) {
		c.Program, c.Library = path, lib
		c.InitTimeout, c.CallTimeout = 2*time.Second, time.Second
		c.Env = []string{"BARE=" + c.Args[1]}
		c.Args = nil
		if change != nil {
			change(c)
		}
	}, faults...)
}

// TestReal has the real program meet what drivers do to it.
func TestReal(t *testing.T) {
	for _, tc := range []struct {
		fault string
		state gpuv1.DriverState
		words string
		ask   bool
	}{
		{"hang-init", unresponsive, "initialisation", false},
		{"hang-temperature", unresponsive, "fast sample", true},
		{"segv-temperature", crashed, "SIGSEGV", true},
		{"segv-init", crashed, "SIGSEGV", false},
		{"mismatch", mismatch, "two versions", false},
		{"unloaded", gpuv1.DriverState_DRIVER_STATE_DRIVER_NOT_LOADED, "modprobe nvidia", false},
	} {
		t.Run(tc.fault, func(t *testing.T) {
			t.Parallel()
			var b *bench
			if tc.ask {
				b = real(t, nil, nil)
				b.await(ok)
				b.set(tc.fault)
				if _, err := b.Sample(t.Context(), gpuv1.Tier_TIER_FAST); err == nil {
					t.Error("the sample was answered")
				}
			} else {
				b = real(t, nil, nil, tc.fault)
			}
			if words := b.await(tc.state); !strings.Contains(words, tc.words) {
				t.Errorf("message %q, want %q in it", words, tc.words)
			}
			b.set()
			begin := time.Now()
			b.await(ok)
			if d := time.Since(begin); d > period+3*time.Second {
				t.Errorf("it was well again after %v", d)
			}
			if s, err := b.Sample(t.Context(), gpuv1.Tier_TIER_SLOW); err != nil || len(s.GetGpus()) != 2 {
				t.Errorf("sample %v, %v", s, err)
			}
		})
	}
}

// A GPU that is lost, and a count that drops, are told by the sample; the driver
// answers, and nothing is restarted.
func TestRealLost(t *testing.T) {
	b := real(t, nil, nil)
	b.await(ok)
	b.set("lost-temperature", "drop")
	s, err := b.Sample(t.Context(), gpuv1.Tier_TIER_FAST)
	if err != nil || s.GetCount() != 1 || len(s.GetGpus()) != 2 {
		t.Fatalf("sample %v, %v", s, err)
	}
	lost := false
	for _, u := range s.GetGpus()[0].GetUnknown() {
		lost = lost || u.GetField() == "gpu_celsius" && u.GetReason() == gpuv1.UnknownReason_UNKNOWN_REASON_GPU_LOST && u.GetCode() == 15
	}
	if g := s.GetGpus()[0]; !lost || g.GpuCelsius != nil || g.GetUuid() != "GPU-1" {
		t.Errorf("GPU %v", g)
	}
	if st := b.Status(); st.GetState() != ok || st.GetStarts() != 1 {
		t.Errorf("status %v", st)
	}
}

func TestRealLibrary(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*gpu.Config)
		flags  []string
		state  gpuv1.DriverState
		words  []string
	}{
		{"missing", func(c *gpu.Config) { c.Library = "/no/such/libnvidia-ml.so.1" }, nil, gpuv1.DriverState_DRIVER_STATE_LIBRARY_MISSING, []string{"/no/such/libnvidia-ml.so.1", "install the NVIDIA driver's libraries"}},
		{"no library", func(c *gpu.Config) { c.Library = "/etc/passwd" }, nil, gpuv1.DriverState_DRIVER_STATE_LIBRARY_MISSING, []string{"/etc/passwd"}},
		{"an essential symbol missing", nil, []string{"-DWITHOUT_UUID"}, noSymbol, []string{"nvmlDeviceGetUUID", "too old"}},
		{"bound at the start", func(c *gpu.Config) { c.Env = append(c.Env, "LD_BIND_NOW=1") }, nil, noSymbol, []string{"exit code 127", "LD_BIND_NOW"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b := real(t, tc.change, tc.flags)
			words := b.await(tc.state)
			for _, w := range tc.words {
				if !strings.Contains(words, w) {
					t.Errorf("message %q, want %q in it", words, w)
				}
			}
		})
	}
}

// The agent's own LD_BIND_NOW does not reach the program.
func TestRealBindNowOfTheAgent(t *testing.T) {
	t.Setenv("LD_BIND_NOW", "1")
	real(t, nil, nil).await(ok)
}

// TestRealMemory holds the program to its part of the budget.
func TestRealMemory(t *testing.T) {
	b := real(t, nil, nil)
	b.await(ok)
	for range 200 {
		if _, err := b.Sample(t.Context(), gpuv1.Tier_TIER_SLOW); err != nil {
			t.Fatal(err)
		}
	}
	pids := children(t, filepath.Dir(mustProgram(t)))
	if len(pids) == 0 {
		t.Fatal("no program")
	}
	for _, cmdline := range pids {
		status, err := os.ReadFile(filepath.Join(filepath.Dir(cmdline), "status"))
		if err != nil {
			continue // another test's, and gone
		}
		var kib int
		for line := range strings.Lines(string(status)) {
			fmt.Sscanf(line, "VmRSS: %d", &kib) //nolint:errcheck // most lines are others
		}
		if kib > 24<<10 {
			t.Errorf("millwright-gpu has %d KiB resident; with the agent's 40 MiB the budget is 64", kib)
		}
		t.Logf("%d KiB resident", kib)
	}
}

func mustProgram(t *testing.T) string {
	t.Helper()
	p, err := program()
	if err != nil {
		t.Fatal(err)
	}
	return p
}
