package fakenvml_test

import (
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestNvidiaSMI(t *testing.T) {
	n := newNode(t, "A100-80", "H100")
	smi := func(want int, args ...string) string {
		t.Helper()
		cmd := n.Command(t.Context(), "nvidia-smi", args...)
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != want {
			t.Fatalf("nvidia-smi %v: %v, want status %d\n%s", args, err, want, out)
		}
		return string(out)
	}
	if got := smi(0, "-L"); strings.Count(got, "GPU-") != 2 || !strings.Contains(got, "GPU 1: NVIDIA H100 80GB HBM3") {
		t.Errorf("-L: %s", got)
	}
	must(t, n.Set(t.Context(), 0, "temperature=77"))
	if got := smi(0, "--query-gpu=index,temperature.gpu", "--format=csv,noheader"); got != "0, 77\n1, 34\n" {
		t.Errorf("query: %q", got)
	}
	smi(2, "--query-gpu=no_such_key.gpu", "--format=csv")
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("set-mig", 0, []uint32{1}, nvml.SUCCESS, int64(nvml.ERROR_RESET_REQUIRED))
	if got := smi(255, "--gpu-reset", "-i", "0"); !strings.Contains(got, "in use by another client") {
		t.Errorf("reset of a GPU in use: %s", got)
	}
	c.want("shutdown", 0, nil, nvml.SUCCESS)
	smi(0, "-pm", "1", "-i", "0")
	smi(255, "--gpu-reset", "-i", "0")
	smi(0, "-pm", "0", "-i", "0")
	smi(0, "--gpu-reset", "-i", "0")
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("mig", 0, nil, nvml.SUCCESS, 1, 1)
	must(t, n.Set(t.Context(), 1, "virtualization=1"))
	if got := smi(255, "-r", "-i", "1"); !strings.Contains(got, "not supported") {
		t.Errorf("reset in a virtual machine: %s", got)
	}
	must(t, n.SetNode(t.Context(), "driver_loaded=0"))
	smi(9, "-L")
}

// TestResetList resets the GPUs of a list, and a group only as a whole.
func TestResetList(t *testing.T) {
	n := newNode(t, "A100-80", "A100-80", "A100-80")
	pending := func() string {
		t.Helper()
		out, err := n.Command(t.Context(), "nvidia-smi", "--query-gpu=mig.mode.current", "--format=csv,noheader").Output()
		must(t, err)
		return strings.ReplaceAll(string(out), "\n", " ")
	}
	reset := func(list string) (string, error) {
		out, err := n.Command(t.Context(), "nvidia-smi", "--gpu-reset", "-i", list).CombinedOutput()
		return string(out), err
	}
	for i := range 3 {
		must(t, n.Set(t.Context(), i, "mig_pending=1"))
	}
	s, err := n.State(t.Context())
	must(t, err)
	if out, err := reset(s.GPUs[0].UUID + ",2"); err != nil || pending() != "Enabled Disabled Enabled " {
		t.Errorf("a list: %v %s, modes %s", err, out, pending())
	}
	for i := range 3 {
		must(t, n.Set(t.Context(), i, "reset_group=1", "mig_current=0"))
	}
	if out, err := reset("0,1"); err == nil || !strings.Contains(out, "must be reset together") || pending() != "Disabled Disabled Disabled " {
		t.Errorf("a part of a group: %v %s, modes %s", err, out, pending())
	}
	if out, err := reset("0,1,2"); err != nil || pending() != "Enabled Enabled Enabled " {
		t.Errorf("a whole group: %v %s, modes %s", err, out, pending())
	}
	if out, err := reset("0,GPU-none"); err == nil || !strings.Contains(out, "No devices") {
		t.Errorf("a GPU that is not there: %v %s", err, out)
	}
}
