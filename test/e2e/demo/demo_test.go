// Package demo runs `make demo`, as it is and with an agent that is broken.
package demo

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

// told are lines that the demo prints only after it has checked them.
var told = []string{
	"the new agent adopted the command: it was started once",
	"it exited with 7 while the agent was down, and is reported as failed with 7",
	"the same InvocationID before and after",
	"Nothing of it is left",
}

func run(t *testing.T, env ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "make", "--no-print-directory", "demo")
	cmd.Dir = clustertest.Root(t)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestDemo(t *testing.T) {
	testbedtest.NeedRoot(t)
	out, err := run(t)
	if err != nil {
		t.Fatalf("make demo: %v\n%s", err, out)
	}
	for _, want := range told {
		if !strings.Contains(out, want) {
			t.Errorf("the demo does not tell %q:\n%s", want, out)
		}
	}
}

func TestDemoFailsWithoutAdoption(t *testing.T) {
	testbedtest.NeedRoot(t)
	out, err := run(t, "DEMO_BREAK=adopt")
	if err == nil {
		t.Fatalf("the demo passes with an agent that does not adopt:\n%s", out)
	}
	if !strings.Contains(out, "agent of n1 is killed in the middle of a task") || strings.Contains(out, told[0]) {
		t.Errorf("it failed elsewhere:\n%s", out)
	}
}
