// Package demo runs `make demo`, as it is and with an agent that is broken.
package demo

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/testbed"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

// told are lines that the demo prints only after it has checked them.
var told = []string{
	"the new agent adopted the command: it was started once",
	"it exited with 7 while the agent was down, and is reported as failed with 7",
	"the same InvocationID before and after",
	"Nothing of it is left",
}

// later is the most that a run may take once the nodes' image is built, by
// what the demo says of itself.
const later = 2 * time.Minute

func run(t *testing.T, target string, env ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "make", "--no-print-directory", target)
	cmd.Dir = clustertest.Root(t)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestDemo(t *testing.T) {
	testbedtest.NeedRoot(t)
	out, err := run(t, "demo")
	if err != nil {
		t.Fatalf("make demo: %v\n%s", err, out)
	}
	for _, want := range told {
		if !strings.Contains(out, want) {
			t.Errorf("the demo does not tell %q:\n%s", want, out)
		}
	}
	// History, steps, output, and how to look further.
	for _, want := range []string{
		`\$ millctl task history [0-9a-f-]{36}\n(.*\n)*.*ACCEPTED(.*\n)*.*SUCCEEDED`, `\$ millctl task get [0-9a-f-]{36}\n(.*\n)*\s+0\s+verified`,
		`\$ millctl task logs [0-9a-f-]{36}\n\s+work steady: start number 1\n`, `make demo-up`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("the demo prints nothing like %s:\n%s", want, out)
		}
	}
	took := regexp.MustCompile(`Done in (\d+) s`).FindStringSubmatch(out)
	if len(took) != 2 {
		t.Fatalf("the demo does not say how long it took:\n%s", out)
	}
	if d, err := time.ParseDuration(took[1] + "s"); err != nil || d > later {
		t.Errorf("the demo took %s s (%v), want at most %s", took[1], err, later)
	}
}

// TestDemoKept keeps the demo running, looks around with what it says, and ends
// it.
func TestDemoKept(t *testing.T) {
	testbedtest.NeedRoot(t)
	t.Cleanup(func() {
		cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "make", "--no-print-directory", "demo-down")
		cmd.Dir = clustertest.Root(t)
		_ = cmd.Run() // it is down already, unless the test failed
	})
	if out, err := run(t, "demo-up"); err != nil || !strings.Contains(out, "To end it: make demo-down") {
		t.Fatalf("make demo-up: %v\n%s", err, out)
	}
	const look = `eval "$(bin/testbed env --name demo)"; bin/millctl node list; bin/millctl task list
echo 'argv: [/usr/local/bin/demo-work, hello, "0"]' | bin/millctl task run system.command -n n1 -f - --wait
bin/testbed exec --name demo n1 -- millwrightd status; bin/testbed exec --name demo n1 -- millwrightd journal list`
	cmd := exec.CommandContext(t.Context(), "sh", "-ec", look)
	cmd.Dir = clustertest.Root(t)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("a look around: %v\n%s", err, out)
	}
	if out, err := run(t, "demo-down"); err != nil {
		t.Errorf("make demo-down: %v\n%s", err, out)
	}
	if _, err := testbed.Open("demo", testbedtest.Log(t)); !errors.Is(err, testbed.ErrNotUp) {
		t.Errorf("after demo-down: %v, want that it is not up", err)
	}
}

func TestDemoFailsWithoutAdoption(t *testing.T) {
	testbedtest.NeedRoot(t)
	out, err := run(t, "demo", "DEMO_BREAK=adopt")
	if err == nil {
		t.Fatalf("the demo passes with an agent that does not adopt:\n%s", out)
	}
	if !strings.Contains(out, "agent of n1 is killed in the middle of a task") || strings.Contains(out, told[0]) {
		t.Errorf("it failed elsewhere:\n%s", out)
	}
}
