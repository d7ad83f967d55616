package network

import (
	"fmt"
	"strings"
	"testing"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/testbed"
)

// oneWay cuts one direction in the middle of a command, which ends meanwhile. A
// task that is made meanwhile is not lost, and run once.
func oneWay(t *testing.T, c *clustertest.Cluster, node string, d testbed.Direction) {
	s := story{kind: "system.command", state: failed, reason: "COMMAND_EXIT", id: c.Start("system.command", node, gated("oneway"))}
	awaitFile(c, node, "/root/runs-oneway")
	c.Await(s.id, running)
	n := c.Machine(node)
	if err := n.CutOneWay(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	bothNotice(t, c, node)
	second := c.Start("system.command", node, `argv: [/bin/sh, -c, "echo run >> /root/runs-second"]`)
	c.Sh(node, "touch /run/go-oneway")
	endsOnNode(c, node, s.id, s.state)
	ended := time.Now()
	c.Sh(node, "sleep 15") // agent and server try again, and half of it arrives
	untouched(t, c, []story{s})
	if task, err := c.Task(t.Context(), second); err != nil || task.GetState() != queued {
		t.Errorf("what was made meanwhile is %s (%v)", task.GetState(), err)
	}
	healed := time.Now()
	if err := n.Heal(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitConnected(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	told(t, c, s, ended, healed)
	if task := c.End(second); task.GetState() != succeeded {
		t.Errorf("what was made meanwhile ended as %s: %s", task.GetState(), task.GetMessage())
	}
	for _, file := range []string{"/root/runs-oneway", "/root/runs-second"} {
		if got := lines(c, node, file); got != "1" {
			t.Errorf("%s has %s lines", file, got)
		}
	}
}

// halfOpenThenBadLine lets n5 vanish without a word, so that the server has half
// of a connection, and then gives it a bad line.
func halfOpenThenBadLine(t *testing.T, c *clustertest.Cluster) {
	const node = "n5"
	n := c.Machine(node)
	from := time.Now()
	if err := n.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	serverSees(t, c, node, from)
	t.Logf("the server saw within %s that a node had vanished", time.Since(from).Round(100*time.Millisecond))
	id := c.Start("system.command", node, `argv: [/bin/sh, -c, "echo run >> /root/runs-vanished"]`)
	if err := n.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if task := c.End(id); task.GetState() != succeeded {
		t.Errorf("what was made while the node was away ended as %s: %s", task.GetState(), task.GetMessage())
	}
	if got := lines(c, node, "/root/runs-vanished"); got != "1" {
		t.Errorf("it ran %s times", got)
	}
	badLine(t, c, node)
}

// badLine works over a line of 200 ms +- 50 ms each way that loses 5 % and lets
// packets overtake each other.
func badLine(t *testing.T, c *clustertest.Cluster, node string) {
	const commands, output = 6, 300_000
	mend, err := c.Machine(node).Worsen(t.Context(), testbed.Line{Delay: 200 * time.Millisecond, Jitter: 50 * time.Millisecond, Loss: 0.05})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := mend(); err != nil {
			t.Error(err)
		}
	}()
	from := time.Now()
	var ids []string
	for i := range commands {
		ids = append(ids, c.Start("system.command", node, fmt.Sprintf(`argv: [/bin/sh, -c, "echo run >> /root/runs-bad-%d; echo out"]`, i)))
	}
	loud := c.Start("system.command", node, fmt.Sprintf(`argv: [/bin/sh, -c, "head -c %d /dev/zero | tr '\\0' x"]`, output))
	ids = append(ids, loud, c.Start("storage.mount", node, "target: /mnt/bad\ntmpfs: {sizeBytes: 1048576}"))
	for _, id := range ids {
		if task := c.End(id); task.GetState() != succeeded {
			t.Errorf("%s ended as %s: %s", task.GetKind(), task.GetState(), task.GetMessage())
		}
		counts := map[string]int{}
		for _, e := range c.Events(id) {
			counts[e.GetType()]++
		}
		if counts["ACCEPTED"] != 1 || counts["STARTED"] > 1 || counts["SUCCEEDED"] != 1 {
			t.Errorf("its history tells %v", counts)
		}
	}
	out, err := c.Millctl(t.Context(), "task", "logs", loud, "-f")
	if err != nil || strings.Count(out.Stdout, "x") != output {
		t.Errorf("%d bytes of output came, want %d (%v)", strings.Count(out.Stdout, "x"), output, err)
	}
	for i := range commands {
		if got := lines(c, node, fmt.Sprintf("/root/runs-bad-%d", i)); got != "1" {
			t.Errorf("command %d ran %s times", i, got)
		}
	}
	c.Sh(node, "test $(grep -c ' /mnt/bad ' /proc/self/mountinfo) = 1")
	if err := c.WaitConnected(t.Context(), node); err != nil {
		t.Error(err)
	}
	t.Logf("%d tasks and %d bytes over the bad line took %s", len(ids), output, time.Since(from).Round(time.Second))
}

// twoHosts copies the state of n6 to n7, and lets both agents run.
func twoHosts(t *testing.T, c *clustertest.Cluster) {
	const node, other = "n6", "n7"
	c.Sh(node, "systemctl stop millwrightd.service; tar -C /var/lib -cf /root/state.tar millwright; tar -C /etc -rf /root/state.tar --transform 's,^millwright,etc,' millwright; systemctl start millwrightd.service")
	state, err := c.Machine(node).ReadFile(t.Context(), "/root/state.tar")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Machine(other).WriteFile(t.Context(), "/root/state.tar", state, 0o600); err != nil {
		t.Fatal(err)
	}
	c.Sh(other, "set -e; rm -rf /var/lib/millwright; tar -C /var/lib -xf /root/state.tar millwright; tar -C /root -xf /root/state.tar etc; cp -a /root/etc/. /etc/millwright/; systemctl start millwrightd.service")
	duplicate := func() (string, bool) {
		n, err := c.Node(t.Context(), node)
		found := conditionOf(n, "DuplicateIdentity")
		return fmt.Sprint(n, err), found.GetStatus() == taskv1.ConditionStatus_CONDITION_STATUS_TRUE
	}
	took := within(t, 2*time.Minute, "DuplicateIdentity is raised", duplicate)
	t.Logf("found after %s", took.Round(100*time.Millisecond))
	id := c.Start("system.command", node, `argv: [/bin/sh, -c, "echo run >> /root/runs-double"]`)
	noWork := func(when string) {
		t.Helper()
		c.Sh(node, "sleep 5")
		if task, err := c.Task(t.Context(), id); err != nil || task.GetState() != queued {
			t.Errorf("%s: its task is %s (%v)", when, task.GetState(), err)
		}
		if said, ok := duplicate(); !ok {
			t.Errorf("%s: the condition has gone: %s", when, said)
		}
		for _, host := range []string{node, other} {
			if got := lines(c, host, "/root/runs-double"); got != "0" {
				t.Errorf("%s: it ran on %s", when, host)
			}
		}
	}
	noWork("with two hosts")
	c.Sh(other, "systemctl disable --now millwrightd.service; rm -rf /var/lib/millwright")
	c.Sh(node, "systemctl restart millwrightd.service")
	noWork("with one of the two")
	c.Sh(node, "systemctl stop millwrightd.service; rm -rf /var/lib/millwright")
	if err := c.Rejoin(t.Context(), c.Machine(node)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Node(t.Context(), node); err != nil || conditionOf(n, "DuplicateIdentity") != nil || n.GetState() != connected {
		t.Errorf("after a new enrolment the node is %v (%v)", n, err)
	}
	// Either of the two may have run what was signed before, for all that the new
	// journal knows.
	task := c.End(id)
	if got := lines(c, node, "/root/runs-double"); task.GetReason() != "BELOW_FLOOR" || got != "0" {
		t.Errorf("after a new enrolment the task ended as %s %s: %s; it ran %s times", task.GetState(), task.GetReason(), task.GetMessage(), got)
	}
	task = c.Do("system.command", node, `argv: [/bin/sh, -c, "echo run >> /root/runs-double"]`)
	if got := lines(c, node, "/root/runs-double"); task.GetState() != succeeded || got != "1" {
		t.Errorf("what was signed since ended as %s: %s; it ran %s times", task.GetState(), task.GetMessage(), got)
	}
}
