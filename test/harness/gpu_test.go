package harness_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/fakenvml"
	"github.com/gpuaas/millwright/test/harness"
)

// TestGPUHealth has the whole agent look after the GPUs of the fake library with
// the real millwright-gpu: an XID becomes one numbered event that the server
// acknowledges, over a cut and a new start of the agent, and the node says that
// its GPUs are not ready.
func TestGPUHealth(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	gpus, program, log := fakeGPUs(t)
	use := func(cfg *agent.Config) {
		cfg.GPUMode, cfg.GPUProgram, cfg.GPUPeriod, cfg.GPUSlowPeriod, cfg.KernelLog = "on", program, 200*time.Millisecond, time.Second, log
	}
	stop := n.Start(use)
	n.Connected()
	ready := func() taskv1.ConditionStatus {
		for _, cond := range n.Connected().GetConditions() {
			if cond.GetType() == "GPUReady" {
				return cond.GetStatus()
			}
		}
		return taskv1.ConditionStatus_CONDITION_STATUS_UNSPECIFIED
	}
	await(t, "GPUs are ready", func() bool { return ready() == taskv1.ConditionStatus_CONDITION_STATUS_TRUE })
	before := n.Status().GetLastSeq()
	st, err := gpus.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	n.Cut()
	line := fmt.Sprintf("4,1,1,-;NVRM: Xid (PCI:%s): 95, pid=7, name=train, uncontained\n", strings.TrimSuffix(st.GPUs[1].Bus, ".0"))
	if err := os.WriteFile(log, []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	await(t, "the edge is in the journal", func() bool { return n.Status().GetLastSeq() == before+1 })
	n.Heal()
	await(t, "GPUs are not ready", func() bool { return ready() == taskv1.ConditionStatus_CONDITION_STATUS_FALSE })
	await(t, "the edge is acknowledged", func() bool { return n.Status().GetAcknowledgedSeq() == before+1 })
	stop()
	n.Start(use)
	await(t, "GPUs are not ready after a new start", func() bool {
		return n.Status().GetConnected() && ready() == taskv1.ConditionStatus_CONDITION_STATUS_FALSE
	})
	if got := n.Status().GetLastSeq(); got != before+1 {
		t.Errorf("the journal ends at %d, want %d: an edge was told twice", got, before+1)
	}
}

// fakeGPUs are two GPUs of the fake library, a millwright-gpu that finds them,
// and a log of the kernel.
func fakeGPUs(t *testing.T) (n *fakenvml.Node, program, log string) {
	t.Helper()
	dir := t.TempDir()
	lib, err := fakenvml.Build(t.Context(), fakenvml.Variant{})
	if err != nil {
		t.Fatal(err)
	}
	if n, err = lib.NewNode(t.Context(), filepath.Join(dir, "gpus"), "H100", "H100"); err != nil {
		t.Fatal(err)
	}
	real := filepath.Join(dir, "millwright-gpu.real")
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags", "-extldflags=-Wl,-z,lazy", "-o", real, "github.com/gpuaas/millwright/agent/cmd/millwright-gpu")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build millwright-gpu: %v\n%s", err, out)
	}
	// The agent hands its environment to nobody: the library's is set here.
	program, log = filepath.Join(dir, "millwright-gpu"), filepath.Join(dir, "kmsg")
	if err := os.WriteFile(log, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\nexport " + strings.Join(n.Env(), " ") + "\nexec " + real + " \"$@\"\n"
	if err := os.WriteFile(program, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return n, program, log
}
