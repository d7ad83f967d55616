package testbed_test

import (
	"bytes"
	"context"
	"os/exec"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/test/testbed/cli"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

// TestCommandLine takes a testbed through its life by the words that a person
// types.
func TestCommandLine(t *testing.T) {
	testbedtest.NeedRoot(t)
	name := testbedtest.Name(t)
	run := func(want int, args ...string) string {
		t.Helper()
		var out bytes.Buffer
		if code := cli.Run(t.Context(), append([]string{"--name", name}, args...), strings.NewReader("typed\n"), &out, t.Output()); code != want {
			t.Fatalf("testbed %s: exit status %d, want %d", strings.Join(args, " "), code, want)
		}
		return out.String()
	}
	has := func(out string, words ...string) {
		t.Helper()
		for _, w := range words {
			if !strings.Contains(out, w) {
				t.Errorf("it prints\n%s\nwithout %q", out, w)
			}
		}
	}
	t.Cleanup(func() { // after a failure; it is down otherwise
		_ = exec.CommandContext(context.WithoutCancel(t.Context()), "go", "run", "./cmd/testbed", "down", "--name", name).Run()
	})
	has(run(0, "up", "-n", "1"), name, "n1", "on")
	env, err := exec.CommandContext(t.Context(), "sh", "-ec", run(0, "env")+`echo "$MILLWRIGHT_TESTBED $MILLWRIGHT_TESTBED_NODES $MILLWRIGHT_HOME $MILLWRIGHT_TESTBED_ADDRESS"`).Output()
	if err != nil {
		t.Fatalf("a shell cannot read what env prints: %v", err)
	}
	has(string(env), name+" n1 /var/lib/millwright-testbed/"+name+"/home 10.213.")

	has(run(0, "exec", "n1", "--", "cat"), "typed")
	run(7, "exec", "n1", "--", "sh", "-c", "exit 7")
	boot := run(0, "exec", "n1", "--", "cat", "/proc/sys/kernel/random/boot_id")
	run(0, "reboot", "n1")
	if again := run(0, "exec", "n1", "--", "cat", "/proc/sys/kernel/random/boot_id"); again == boot {
		t.Error("the boot id is the same after a reboot")
	}
	run(0, "cut", "n1")
	has(run(0, "list"), name, "cut")
	run(0, "cut", "n1", "--in")
	run(0, "cut", "n1", "--out")
	run(1, "cut", "n1", "--in", "--out")
	run(0, "heal", "n1")
	run(0, "kill", "n1")
	has(run(0, "list"), "off")
	run(1, "exec", "n1", "--", "true")
	has(run(0, "logs", "n1", "--", "--lines=1000"), "systemd")
	run(0, "start", "n1")
	run(0, "exec", "n1", "--", "true")
	run(1, "exec", "n9", "--", "true")
	run(0, "down")
	run(1, "env")
	if left := leftovers(t, name, -1); len(left) != 0 {
		t.Errorf("left after down: %q", left)
	}
}
