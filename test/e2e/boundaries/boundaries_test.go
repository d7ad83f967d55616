// Package boundaries breaks what stands between a task and its effect: the bus,
// systemd, and the agent's hold on a running unit.
package boundaries

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// breakages are what happens in the middle of a task. The last one is what
// adoption is about: the agent does not see it happen.
var breakages = []struct{ name, line string }{
	{"reload", "systemctl daemon-reload"},
	{"reexec", "systemctl daemon-reexec"},
	{"bus-restarted", "systemctl restart dbus.service"},
	{"bus-killed", "systemctl kill --signal=KILL dbus.service"},
	{"agent-killed", "systemctl kill --kill-whom=main --signal=KILL millwrightd.service"},
	{"agent-killed-and-reexec", "systemctl kill --kill-whom=main --signal=KILL millwrightd.service; systemctl daemon-reexec"},
}

func TestBoundaries(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 3})
	var side sync.WaitGroup
	side.Go(func() {
		for _, b := range breakages {
			t.Run("command/"+b.name, func(t *testing.T) { command(t, c.With(t), "n1", b.name, b.line) })
		}
	})
	side.Go(func() {
		for _, b := range breakages {
			t.Run("mount/"+b.name, func(t *testing.T) { mount(t, c.With(t), "n2", b.name, b.line) })
		}
	})
	side.Go(func() {
		t.Run("foreign unit", func(t *testing.T) { foreign(t, c.With(t), "n3") })
		t.Run("many units", func(t *testing.T) { many(t, c.With(t), "n3") })
	})
	side.Wait()
}

// command breaks something while a program runs: it goes on, ends once, and what
// is told of it is of the unit that was started, in this boot.
func command(t *testing.T, c *clustertest.Cluster, node, name, line string) {
	label := "command-" + name
	id := c.Start("system.command", node, fmt.Sprintf(
		`argv: [/bin/sh, -c, "echo run >> /root/%[1]s; until test -e /run/go-%[1]s; do sleep 0.1; done; echo out; exit 7"]`, label))
	c.Sh(node, "for i in $(seq 300); do test -e /root/"+label+" && exit 0; sleep 0.1; done; exit 1")
	unit := c.Sh(node, "systemctl list-units --no-legend --plain 'millwright-task-"+id+"-*' | cut -d' ' -f1")
	invocation := c.Sh(node, "systemctl show -P InvocationID "+unit)
	c.Sh(node, line+fmt.Sprintf("; sleep 1; touch /run/go-%s", label))
	task := c.End(id)
	outcome := task.GetSteps()[0].GetCommand()
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetReason() != "COMMAND_EXIT" || outcome.GetExitCode() != 7 {
		t.Errorf("it is %s %s: %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	if boot := c.Sh(node, "cat /proc/sys/kernel/random/boot_id"); outcome.GetInvocationId() != invocation || outcome.GetBootId() != boot {
		t.Errorf("its outcome is of invocation %q in boot %q, and the unit was %q in %q", outcome.GetInvocationId(), outcome.GetBootId(), invocation, boot)
	}
	if n := c.Sh(node, "wc -l < /root/"+label); n != "1" {
		t.Errorf("it ran %s times", n)
	}
	nothingLeft(c, node)
}

// mount breaks something while the job of a mount unit waits: its end is told to
// nobody then, since the connection that asked is gone.
func mount(t *testing.T, c *clustertest.Cluster, node, name, line string) {
	label := strings.ReplaceAll("mount-"+name, "-", "")
	c.Sh(node, fmt.Sprintf(`set -e; mkdir -p /srv/%[1]s; cd /run/systemd/system
printf '[Unit]\nDefaultDependencies=no\nBefore=mnt-%[1]s.mount\n[Service]\nType=oneshot\nTimeoutStartSec=60\nExecStart=/bin/sh -c "touch /run/begun-%[1]s; until test -e /run/go-%[1]s; do sleep 0.1; done"\n' > hold-%[1]s.service
mkdir mnt-%[1]s.mount.requires; ln -s ../hold-%[1]s.service mnt-%[1]s.mount.requires/; systemctl daemon-reload`, label))
	id := c.Start("storage.mount", node, fmt.Sprintf("target: /mnt/%[1]s\nbind: {path: /srv/%[1]s}", label))
	c.Sh(node, fmt.Sprintf("for i in $(seq 300); do test -e /run/begun-%s && exit 0; sleep 0.1; done; exit 1", label))
	c.Sh(node, line+fmt.Sprintf("; sleep 1; touch /run/go-%s", label))
	begin := time.Now()
	if task := c.End(id); task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("it is %s %s: %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	if took := time.Since(begin); took > 45*time.Second {
		t.Errorf("it took %s", took)
	}
	c.Sh(node, fmt.Sprintf(`test $(awk '$5 == "/mnt/%[1]s"' /proc/self/mountinfo | wc -l) = 1; systemctl is-active --quiet mnt-%[1]s.mount`, label))
	nothingLeft(c, node)
}

// foreign gives the name of a command's unit to someone else before the command
// begins. It is held: what runs there is not ours, and is left alone.
func foreign(t *testing.T, c *clustertest.Cluster, node string) {
	id := c.Start("system.command", node, `argv: [/bin/sh, -c, "echo run >> /root/foreign"]`, "--not-before", "6s")
	unit := "millwright-task-" + id + "-0-1.service"
	c.Sh(node, "systemd-run --unit "+unit+" /bin/sleep 1000")
	task := c.End(id)
	if task.GetState() != taskv1.TaskState_TASK_STATE_HELD || task.GetReason() != "OUTCOME_UNKNOWN" || !strings.Contains(task.GetMessage(), unit) {
		t.Errorf("it is %s %s: %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	c.Sh(node, "test ! -e /root/foreign; systemctl is-active --quiet "+unit+"; systemctl stop "+unit)
	if _, err := c.Millctl(t.Context(), "task", "resolve", id, "--as", "abandon", "--reason", "test", "--wait"); err != nil {
		t.Error(err)
	}
	nothingLeft(c, node)
}

// many runs 10,000 commands on a node through the agent's own hands, and then
// starts the agent of the node.
func many(t *testing.T, c *clustertest.Cluster, node string) {
	binary := filepath.Join(t.TempDir(), "host.test")
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-tags", "millwright_node", "-o", binary, "./agent/internal/host")
	build.Dir, build.Env = clustertest.Root(t), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("compile the node tests: %v\n%s", err, out)
	}
	data, err := os.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Machine(node).WriteFile(t.Context(), "/opt/host.test", data, 0o755); err != nil {
		t.Fatal(err)
	}
	start := func() time.Duration {
		begin := time.Now()
		c.Sh(node, `systemctl restart millwrightd.service; for i in $(seq 300); do millwrightd status -o json | grep -q '"connected": *true' && exit 0; sleep 0.05; done; exit 1`)
		return time.Since(begin)
	}
	units := cmp.Or(os.Getenv("MILLWRIGHT_UNITS"), "1000") // make soak has 10,000
	before := start()
	out := c.Sh(node, "MILLWRIGHT_NODE_TEST=1 MILLWRIGHT_UNITS="+units+" TMPDIR=/var/tmp /opt/host.test -test.v -test.run '^TestManyUnits$' -test.timeout 25m || echo BAD")
	after := start()
	t.Logf("the agent was up and connected after %s, and afterwards after %s; in the node:\n%s", before, after, out[max(0, len(out)-2000):])
	if !strings.Contains(out, "--- PASS: TestManyUnits") || strings.Contains(out, "BAD") {
		t.Error("it did not pass in the node")
	}
	if after > 3*before+5*time.Second {
		t.Errorf("the agent took %s to start before, and %s after", before, after)
	}
}

func nothingLeft(c *clustertest.Cluster, node string) {
	c.Sh(node, `for i in $(seq 300); do u=$(systemctl list-units --all --no-legend --plain 'millwright-task-*'); test -z "$u" && exit 0; sleep 0.1; done; echo "left: $u" >&2; exit 1`)
}
