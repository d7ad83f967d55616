//go:build millwright_node

package nodehost_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	nodehost "github.com/gpuaas/millwright/agent/internal/host"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/agent/internal/host/gpus"
	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/host/hosttest"
)

// gpuProgram is where the suite that runs these tests puts the program. The
// stand-in for the driver's library is where the driver's would be.
const gpuProgram = "/opt/millwright-gpu"

// fakeGPUs makes a fresh state of the stand-in, and takes it away in the end.
func fakeGPUs(t *testing.T, products string) (uuids []string) {
	t.Helper()
	asRoot(t, "rm -rf /run/fakenvml; mkdir /run/fakenvml; ln -s /dev /run/fakenvml/dev; fakenvml-state create "+products+"; nvidia-smi -L")
	t.Cleanup(func() { asRoot(t, "rm -rf /run/fakenvml /run/cdi/millwright-gpu.json /dev/nvidia*") })
	out, err := exec.Command("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(out))
}

// holdGPU has a process hold the first GPU.
func holdGPU(t testing.TB, args ...string) (int, func()) {
	t.Helper()
	cmd := exec.Command("fakenvml-state", append([]string{"hold", "0"}, args...)...)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 16)); err != nil { // it says when it holds
		t.Fatal(err)
	}
	return cmd.Process.Pid, func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // it was killed
	}
}

// TestGPUs puts the real node, with systemd and device nodes, to the suite.
func TestGPUs(t *testing.T) {
	needNode(t)
	for _, product := range []string{"A100-80", "H100"} {
		t.Run(product, func(t *testing.T) {
			uuid := fakeGPUs(t, product)[0]
			n := nodehost.New(nodehost.Config{
				StateDir: t.TempDir(), Executable: "/proc/self/exe", Clock: clock.System{}, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
				GPUProgram: gpuProgram,
			})
			t.Cleanup(func() { _ = n.Close(context.Background()) })
			hosttest.GPUs(t, n.ForStep("gpus", 0), hosttest.GPUEnv{
				UUID: uuid,
				Hold: func(t testing.TB) (int, func()) { return holdGPU(t) },
				Compute: func(t testing.TB, gi, ci uint32) func() {
					_, release := holdGPU(t, "compute", fmt.Sprint(gi), fmt.Sprint(ci))
					return release
				},
			})
		})
	}
}

// gpuSet is a Set with a shorter deadline, as of an agent that was just started.
func gpuSet(t *testing.T) *gpus.Set {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	sd := systemd.New(systemd.Config{
		Logger: log, Logs: func(context.Context, string, time.Time) []string { return nil },
		Users: func(context.Context, string) ([]host.Use, error) { return nil, nil },
	})
	t.Cleanup(sd.Close)
	return gpus.New(gpus.Config{
		Program: gpuProgram, Children: child.New(child.Config{Logger: log}), Changes: gpus.InUnits(sd, t.TempDir()), Files: files.New(),
		Find: func(_ context.Context, name string) (string, error) { return exec.LookPath(name) }, Timeout: 8 * time.Second,
	})
}

func gpuFaults(t *testing.T, lines string) {
	t.Helper()
	if err := os.WriteFile("/run/fakenvml/state.new", []byte(lines), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename("/run/fakenvml/state.new", "/run/fakenvml/state.faults"); err != nil {
		t.Fatal(err)
	}
}

// TestGPUChangeOutlivesTheAgent: an agent ends in the middle of a change. The
// next one waits for its end before it looks, and sees all of it.
func TestGPUChangeOutlivesTheAgent(t *testing.T) {
	needNode(t)
	uuid := fakeGPUs(t, "H100")[0]
	asRoot(t, "fakenvml-state set 0 mig_current=1 mig_pending=1")
	gpuFaults(t, "call=nvmlDeviceCreateGpuInstanceWithPlacement latency=4s\n")
	at := host.MIGPlace{Profile: 9, Start: 4}
	ctx, end := context.WithCancel(t.Context())
	went := make(chan error, 1)
	go func() { went <- gpuSet(t).CreateGPUInstance(ctx, uuid, at) }()
	for deadline := time.Now().Add(20 * time.Second); ; <-time.After(50 * time.Millisecond) {
		out, _ := exec.Command("systemctl", "is-active", "millwright-gpu-change.service").Output()
		if strings.TrimSpace(string(out)) == "activating" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the change does not run: %s", out)
		}
	}
	end()
	if err := <-went; err == nil {
		t.Fatal("the change was awaited: the test shows nothing")
	}
	next := gpuSet(t)
	begin := time.Now()
	s, err := next.GPUState(t.Context(), uuid)
	if _, there := s.Instance(at); err != nil || !there {
		t.Errorf("after %v the layout is %+v (%v), want the instance", time.Since(begin), s.Instances, err)
	}
	if err := next.CreateGPUInstance(t.Context(), uuid, at); err != nil {
		t.Errorf("asked for again: %v", err)
	}
}

// TestGPUChangeThatHangs: systemd ends it at its deadline, nothing was made, and
// the next change is.
func TestGPUChangeThatHangs(t *testing.T) {
	needNode(t)
	uuid := fakeGPUs(t, "H100")[0]
	asRoot(t, "fakenvml-state set 0 mig_current=1 mig_pending=1")
	set, at := gpuSet(t), host.MIGPlace{Profile: 9, Start: 4}
	for _, fault := range []string{"sleep=inf", "signal=11", "exit=127"} {
		gpuFaults(t, "call=nvmlDeviceCreateGpuInstanceWithPlacement "+fault+"\n")
		err := set.CreateGPUInstance(t.Context(), uuid, at)
		if !errors.Is(err, host.ErrGPUUnresponsive) {
			t.Errorf("%s: %v", fault, err)
		}
		t.Log(err)
		if s, err := set.GPUState(t.Context(), uuid); err != nil || len(s.Instances) > 0 {
			t.Errorf("%s: the layout is %+v (%v)", fault, s.Instances, err)
		}
	}
	gpuFaults(t, "")
	if err := set.CreateGPUInstance(t.Context(), uuid, at); err != nil {
		t.Error(err)
	}
	out, err := exec.Command("systemctl", "list-units", "--all", "--no-legend", "millwright-gpu-*").Output()
	if err != nil || len(strings.TrimSpace(string(out))) > 0 {
		t.Errorf("units are left: %s (%v)", out, err)
	}
}
