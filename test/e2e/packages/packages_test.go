// Package packages_test installs the Debian packages on real nodes.
package packages_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/testbed"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

const limit = 30 * time.Second

// deb returns a package that `make deb` built.
func deb(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("../../../dist", name+".deb"))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func node(t *testing.T, bed *testbed.Testbed, name string) *testbed.Node {
	t.Helper()
	n, err := bed.Node(name)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func property(t *testing.T, n *testbed.Node, unit, name string) string {
	t.Helper()
	return strings.TrimSpace(testbedtest.Exec(t, n, "systemctl", "show", "--value", "--property="+name, unit))
}

func TestInstallOnANodeThatHasNotJoined(t *testing.T) {
	bed := testbedtest.Up(t, testbed.Config{Nodes: 1})
	n := node(t, bed, "n1")
	for _, name := range []string{"millwright-agent", "millwright-server", "millwright-ctl"} {
		if err := n.Install(t.Context(), deb(t, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, argv := range [][]string{
		{"millwrightd", "config", "check"},
		{"millwrightd", "policy", "check"},
		{"millwright-server", "config", "check"},
		{"millctl", "--help"},
	} {
		testbedtest.Exec(t, n, argv...)
	}
	units := []string{"millwrightd.service", "millwright-server.service", "millwright-restored.service", "millwright.slice"}
	res, err := n.Exec(t.Context(), append([]string{"systemd-analyze", "verify"}, units...)...)
	if complaints := string(res.Stderr); err != nil || strings.Contains(complaints, "millwright") {
		t.Errorf("systemd-analyze verify: %v: %s", err, complaints)
	}
	for _, unit := range units[:3] {
		if state := property(t, n, unit, "ActiveState"); state != "inactive" {
			t.Errorf("%s is %s before the node has joined, want inactive", unit, state)
		}
		if state := property(t, n, unit, "UnitFileState"); state != "disabled" {
			t.Errorf("%s is %s before the node has joined, want disabled", unit, state)
		}
	}
	if got := testbedtest.Exec(t, n, "systemctl", "is-system-running"); got != "running\n" {
		t.Errorf("systemd reports %q with the packages installed", got)
	}
	if got := testbedtest.Exec(t, n, "stat", "-c", "%U %a", "/var/lib/millwright-server"); got != "millwright-server 700\n" {
		t.Errorf("the server's state directory: got %q", got)
	}
	rules := testbedtest.Exec(t, n, "grep", "-v", "^ *#", "/etc/millwright/policy.yaml")
	if strings.Contains(rules, "system.command") {
		t.Errorf("the default policy has a rule for system.command:\n%s", rules)
	}
}

func TestServerRunsAsItsOwnUser(t *testing.T) {
	bed := testbedtest.Up(t, testbed.Config{Nodes: 1})
	n := node(t, bed, "n1")
	for _, name := range []string{"millwright-server", "millwright-ctl"} {
		if err := n.Install(t.Context(), deb(t, name)); err != nil {
			t.Fatal(err)
		}
	}
	testbedtest.Exec(t, n, "millctl", "operator", "init", "--name", "alice", "--trust-domain", "example.org", "--out", "/tmp/founding.json")
	testbedtest.Exec(t, n, "chmod", "644", "/tmp/founding.json")
	testbedtest.Exec(t, n, "runuser", "-u", "millwright-server", "--", "millwright-server", "init", "--trust-root", "/tmp/founding.json",
		"--trust-domain", "example.org", "--context-out", "/var/lib/millwright-server/context.json")
	testbedtest.Exec(t, n, "systemctl", "enable", "--now", "millwright-server.service")
	testbedtest.Exec(t, n, "millctl", "context", "add", "/var/lib/millwright-server/context.json")
	if out := testbedtest.Exec(t, n, "millctl", "whoami"); !strings.Contains(out, "spiffe://example.org/operator/alice") {
		t.Errorf("whoami: got %q", out)
	}
	pid := property(t, n, "millwright-server.service", "MainPID")
	if user := testbedtest.Exec(t, n, "stat", "-c", "%U", "/proc/"+pid); user != "millwright-server\n" {
		t.Errorf("the server runs as %q", user)
	}
}

func TestUpgradeRemoveAndPurge(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 1, Policy: "version: 1\nrules:\n  - allow: system.command\n"})
	n := node(t, c.Bed(), "n1")
	ids, err := c.Run(t.Context(), "system.command", "n1", `argv: [/bin/sh, -c, "until test -e /run/go; do sleep 0.1; done"]`)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.WaitState(t.Context(), ids[0], limit, taskv1.TaskState_TASK_STATE_RUNNING); err != nil {
		t.Fatal(err)
	}
	unit := "millwright-task-" + ids[0] + "-0-1.service"
	agent, invocation := property(t, n, "millwrightd.service", "MainPID"), property(t, n, unit, "InvocationID")
	if invocation == "" {
		t.Fatalf("%s has no InvocationID", unit)
	}
	if err := n.Install(t.Context(), deb(t, "millwright-agent")); err != nil {
		t.Fatal(err)
	}
	if now := property(t, n, "millwrightd.service", "MainPID"); now == agent || now == "0" {
		t.Errorf("MainPID of the agent: %s before the upgrade, %s after it", agent, now)
	}
	if now := property(t, n, unit, "InvocationID"); now != invocation {
		t.Errorf("InvocationID of the command: %s before the upgrade, %q after it", invocation, now)
	}
	if policy := testbedtest.Exec(t, n, "cat", "/etc/millwright/policy.yaml"); !strings.Contains(policy, "allow: system.command") {
		t.Errorf("the upgrade changed the policy to %q", policy)
	}
	testbedtest.Exec(t, n, "touch", "/run/go")
	if _, err := c.WaitState(t.Context(), ids[0], limit, taskv1.TaskState_TASK_STATE_SUCCEEDED); err != nil {
		t.Error(err)
	}
	c.Gone("n1", "its agent is removed and purged")
	testbedtest.Exec(t, n, "dpkg", "--remove", "millwright-agent")
	if state := property(t, n, "millwrightd.service", "ActiveState"); state == "active" {
		t.Error("the agent runs after its package was removed")
	}
	testbedtest.Exec(t, n, "test", "-e", "/var/lib/millwright/state.db")
	testbedtest.Exec(t, n, "dpkg", "--purge", "millwright-agent")
	testbedtest.Exec(t, n, "test", "!", "-e", "/var/lib/millwright")
}

// version builds the agent's package again under another version number.
func version(t *testing.T, number string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "agent.deb")
	cmd := exec.CommandContext(t.Context(), "bin/tools/nfpm", "package", "--packager", "deb", "--config", "packaging/nfpm/agent.yaml", "--target", out)
	cmd.Dir = "../../.."
	cmd.Env = append(os.Environ(), "DEB_VERSION="+number, "DEB_ARCH="+runtime.GOARCH, "DEB_BIN=bin")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build version %s: %v\n%s", number, err, b)
	}
	return out
}

// TestAptUpgradeAndDowngrade lets apt put a newer version over the agent and an
// older one again, each in the middle of a command and with a mount that stands.
func TestAptUpgradeAndDowngrade(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 1, Policy: "version: 1\nrules:\n  - allow: \"*\"\n"})
	n := node(t, c.Bed(), "n1")
	testbedtest.Exec(t, n, "mkdir", "-p", "/export")
	c.Do("storage.mount", "n1", "target: /data\nbind: {path: /export}")
	for i, number := range []string{"99.0", "0.0.0~0"} {
		ids, err := c.Run(t.Context(), "system.command", "n1", fmt.Sprintf(`argv: [/bin/sh, -c, "echo run >>/root/runs%[1]d; until test -e /run/go%[1]d; do sleep 0.1; done"]`, i))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.WaitState(t.Context(), ids[0], limit, taskv1.TaskState_TASK_STATE_RUNNING); err != nil {
			t.Fatal(err)
		}
		unit := "millwright-task-" + ids[0] + "-0-1.service"
		agent, invocation := property(t, n, "millwrightd.service", "MainPID"), property(t, n, unit, "InvocationID")
		data, err := os.ReadFile(version(t, number))
		if err != nil {
			t.Fatal(err)
		}
		if err := n.WriteFile(t.Context(), "/root/agent.deb", data, 0o644); err != nil {
			t.Fatal(err)
		}
		testbedtest.Exec(t, n, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "--allow-downgrades", "/root/agent.deb")
		if now := testbedtest.Exec(t, n, "dpkg-query", "-W", "-f", "${Version}", "millwright-agent"); now != number {
			t.Fatalf("version %s is installed, want %s", now, number)
		}
		if now := property(t, n, "millwrightd.service", "MainPID"); now == agent || now == "0" {
			t.Errorf("MainPID of the agent: %s before version %s, %s after it", agent, number, now)
		}
		if now := property(t, n, unit, "InvocationID"); invocation == "" || now != invocation {
			t.Errorf("InvocationID of the command: %q before version %s, %q after it", invocation, number, now)
		}
		testbedtest.Exec(t, n, "touch", fmt.Sprintf("/run/go%d", i))
		if _, err := c.WaitState(t.Context(), ids[0], limit, taskv1.TaskState_TASK_STATE_SUCCEEDED); err != nil {
			t.Error(err)
		}
		if runs := testbedtest.Exec(t, n, "cat", fmt.Sprintf("/root/runs%d", i)); runs != "run\n" {
			t.Errorf("the command ran %q, want once", runs)
		}
		testbedtest.Exec(t, n, "mountpoint", "/data")
	}
}
