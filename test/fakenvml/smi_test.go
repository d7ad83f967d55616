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
