// Package clock steps the wall clocks of real nodes in the middle of their work:
// by an hour and by ten years, both ways, and at boot. The agents are of the
// fault build, which adds what a file says to the clocks; the machine's own clock
// is shared by all nodes and stays.
package clock

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	failed    = taskv1.TaskState_TASK_STATE_FAILED
	running   = taskv1.TaskState_TASK_STATE_RUNNING
	waiting   = taskv1.TaskState_TASK_STATE_WAITING
	refused   = taskv1.TaskState_TASK_STATE_REFUSED

	year = 365 * 24 * time.Hour
	// limited is the deadline of a command that would go on for ever.
	limited = 30 * time.Second
	// soon bounds what needs no more than a reconnect.
	soon = 90 * time.Second
)

// TestClock has a node for each step of the clock, and one that boots without.
func TestClock(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 5, Agent: cluster.Crash})
	var side sync.WaitGroup
	side.Go(func() {
		t.Run("boot without a clock, and reset", func(t *testing.T) { bootAndReset(t, c.With(t), "n5") })
	})
	nodes := []*stepped{
		{node: "n1", wall: time.Hour}, {node: "n2", wall: -time.Hour},
		// Its certificate looks as if it had ended long ago: it gets no session.
		{node: "n3", wall: 10 * year, alone: true}, {node: "n4", wall: -10 * year},
	}
	t.Run("steps", func(t *testing.T) {
		all := func(phase string, do func(*testing.T, *clustertest.Cluster, *stepped)) {
			t.Helper()
			var each sync.WaitGroup
			for _, s := range nodes {
				each.Go(func() { t.Run(phase+" by "+s.wall.String(), func(t *testing.T) { do(t, c.With(t), s) }) })
			}
			each.Wait()
			if t.Failed() {
				t.FailNow()
			}
		}
		all("step", begin)
		// Back-off by a wrong clock: all have to connect anew.
		if err := c.KillServer(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.StartServer(t.Context()); err != nil {
			t.Fatal(err)
		}
		all("work", wrong)
		all("right again", right)
	})
	side.Wait()
}

// stepped is a node whose clock is stepped, with its tasks.
type stepped struct {
	node  string
	wall  time.Duration
	alone bool
	// runs was begun before and ends while the clock is wrong, as does late, by
	// its deadline. open and later are made meanwhile: the one could start by the
	// right clock and the other could not.
	runs, late, open, later string
}

// setClock sets the offsets of a node's agent: of its wall clock, and none of
// the clock since boot.
func setClock(c *clustertest.Cluster, node string, wall time.Duration) {
	c.Sh(node, fmt.Sprintf("cd /var/lib/millwright-crash && echo '%s 0s' > clock.new && mv clock.new clock", wall))
}

func clockOf(t *testing.T, c *clustertest.Cluster, node string) *agentv1.ClockStatus {
	t.Helper()
	var st agentv1.ClockStatus
	if err := protojson.Unmarshal([]byte(c.Sh(node, "millwrightd clock show -o json")), &st); err != nil {
		t.Fatal(err)
	}
	return &st
}

func await(t *testing.T, limit time.Duration, what string, ok func() (string, bool)) {
	t.Helper()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(limit); ; <-tick.C {
		said, good := ok()
		if good {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %s it is not so: %s: %s", limit, what, said)
		}
	}
}

func doubts(t *testing.T, c *clustertest.Cluster, node string, want bool) {
	t.Helper()
	await(t, soon, fmt.Sprintf("%s doubts its clock: %t", node, want), func() (string, bool) {
		said := clockOf(t, c, node).GetDoubt()
		return said, (said != "") == want
	})
}

// putOff waits until the node has put a task off for its clock's sake.
func putOff(t *testing.T, c *clustertest.Cluster, id string) {
	t.Helper()
	await(t, soon, "the task is put off with CLOCK_UNTRUSTED", func() (string, bool) {
		task, err := c.Task(t.Context(), id)
		return fmt.Sprint(task, err), slices.ContainsFunc(task.GetConditions(), func(one *taskv1.Condition) bool {
			return one.GetType() == "Deferred" && one.GetReason() == "CLOCK_UNTRUSTED"
		})
	})
}

func command(name, then string) string {
	return fmt.Sprintf(`argv: [/bin/sh, -c, "echo run >> /root/runs-%s; %s"]`, name, then)
}

func ran(t *testing.T, c *clustertest.Cluster, node, name, want string) {
	t.Helper()
	if got := c.Sh(node, "cat /root/runs-"+name+" 2>/dev/null | wc -l"); got != want {
		t.Errorf("%s ran %s times on %s, want %s", name, got, node, want)
	}
}

// begin has two commands run, and steps the clock under them.
func begin(t *testing.T, c *clustertest.Cluster, s *stepped) {
	s.runs = c.Start("system.command", s.node, command("gated", "until test -e /run/go; do sleep 0.1; done; exit 7"))
	s.late = c.Start("system.command", s.node, command("late", "while :; do sleep 1; done"), "--deadline", limited.String())
	for _, id := range []string{s.runs, s.late} {
		c.Await(id, running)
	}
	c.Sh(s.node, "until test -s /root/runs-gated && test -s /root/runs-late; do sleep 0.05; done")
	setClock(c, s.node, s.wall)
	doubts(t, c, s.node, true)
}

// wrong gives the node work that it must not begin, while what runs ends.
func wrong(t *testing.T, c *clustertest.Cluster, s *stepped) {
	if !s.alone {
		if err := c.WaitConnected(t.Context(), s.node); err != nil {
			t.Fatal(err)
		}
	}
	s.open = c.Start("system.command", s.node, command("open", "true"), "--valid-for", "30m")
	s.later = c.Start("system.command", s.node, command("later", "true"), "--not-before", "30m", "--valid-for", "24h")
	if !s.alone {
		putOff(t, c, s.open)
	}
	c.Sh(s.node, "touch /run/go")
	for id, reason := range map[string]string{s.runs: "COMMAND_EXIT", s.late: "DEADLINE_EXCEEDED"} {
		c.Sh(s.node, fmt.Sprintf(`for i in $(seq 600); do o=$(millwrightd journal list %s -o json 2>&1) && printf %%s "$o" | grep -q '"%s"' && exit 0; sleep 0.1; done; printf '%%s' "$o" >&2; exit 1`, id, reason))
	}
	for _, name := range []string{"open", "later"} {
		ran(t, c, s.node, name, "0")
	}
	if s.alone {
		n, err := c.Node(t.Context(), s.node)
		if err != nil || n.GetState() == nodev1.NodeState_NODE_STATE_CONNECTED {
			t.Errorf("with a certificate that looks ended the node is %s (%v)", n.GetState(), err)
		}
	}
}

// right sets the clock right and asks that everything happened once, and when it
// had to.
func right(t *testing.T, c *clustertest.Cluster, s *stepped) {
	setClock(c, s.node, 0)
	doubts(t, c, s.node, false)
	if err := c.WaitConnected(t.Context(), s.node); err != nil {
		t.Fatal(err)
	}
	if task := c.End(s.open); task.GetState() != succeeded {
		t.Errorf("what was put off ended as %s: %s", task.GetState(), task.GetMessage())
	}
	if task := c.End(s.runs); task.GetState() != failed || task.GetReason() != "COMMAND_EXIT" {
		t.Errorf("what ran ended as %s %s: %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	if task := c.End(s.late); task.GetState() != failed || task.GetReason() != "DEADLINE_EXCEEDED" {
		t.Errorf("what had a deadline ended as %s %s: %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	var from, to time.Duration // by the clock since boot
	for _, e := range c.Events(s.late) {
		switch n := e.GetNodeEvent(); {
		case n.GetStarted() != nil:
			from = n.GetBootTime().AsDuration()
		case cluster.Terminal(e.GetState()):
			to = n.GetBootTime().AsDuration()
		}
	}
	if took := to - from; took < limited-2*time.Second || took > limited+20*time.Second {
		t.Errorf("a deadline of %s was over after %s", limited, took)
	}
	c.Await(s.later, waiting) // for half an hour
	if _, err := c.Millctl(t.Context(), "task", "cancel", s.later, "--reason", "a test"); err != nil {
		t.Error(err)
	}
	if task := c.Do("system.command", s.node, command("after", "true")); task.GetState() != succeeded {
		t.Errorf("after all of it a command ends as %s: %s", task.GetState(), task.GetMessage())
	}
	for name, want := range map[string]string{"gated": "1", "late": "1", "open": "1", "later": "0", "after": "1"} {
		ran(t, c, s.node, name, want)
	}
	if n := c.Sh(s.node, "systemctl show -P NRestarts millwrightd.service"); n != "0" {
		t.Errorf("the agent was started again %s times", n)
	}
}

// bootAndReset boots a node with a clock of 1970, sets it right, and then lets it
// believe a clock that is ahead while it hears no server, which root settles.
func bootAndReset(t *testing.T, c *clustertest.Cluster, node string) {
	n := c.Machine(node)
	setClock(c, node, -time.Duration(time.Now().Unix())*time.Second)
	if err := n.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	doubts(t, c, node, true)
	if st := clockOf(t, c, node); !strings.Contains(st.GetDoubt(), "1970") || !strings.Contains(c.Sh(node, "millwrightd clock show"), "1970") {
		t.Errorf("clock show says %v", st)
	}
	if err := c.WaitConnected(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	id := c.Start("system.command", node, command("boot", "true"))
	putOff(t, c, id)
	ran(t, c, node, "boot", "0")
	setClock(c, node, 0)
	if task := c.End(id); task.GetState() != succeeded {
		t.Errorf("once the clock was right it ended as %s: %s", task.GetState(), task.GetMessage())
	}
	ran(t, c, node, "boot", "1")

	c.Sh(node, "systemctl stop millwrightd.service")
	if err := n.Cut(t.Context()); err != nil {
		t.Fatal(err)
	}
	setClock(c, node, 6*time.Hour)
	c.Sh(node, "systemctl start --no-block millwrightd.service; for i in $(seq 600); do millwrightd clock show >/dev/null 2>&1 && exit 0; sleep 0.1; done; exit 1")
	await(t, soon, "the node believes a clock that is ahead", func() (string, bool) {
		st := clockOf(t, c, node)
		return fmt.Sprint(st), st.GetHighWater().AsTime().After(time.Now().Add(5 * time.Hour))
	})
	setClock(c, node, 0)
	if err := n.Heal(t.Context()); err != nil {
		t.Fatal(err)
	}
	reset(t, c, node)
}

func reset(t *testing.T, c *clustertest.Cluster, node string) {
	if err := c.WaitConnected(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	doubts(t, c, node, true)
	id := c.Start("system.command", node, command("before", "true"))
	putOff(t, c, id)
	c.Sh(node, "millwrightd clock reset; test $? = 2")
	doubts(t, c, node, true)
	if said := c.Sh(node, "millwrightd clock reset --yes"); !strings.Contains(said, "high water") {
		t.Errorf("clock reset said %q", said)
	}
	doubts(t, c, node, false)
	if task := c.End(id); task.GetState() != refused || task.GetReason() != "BELOW_FLOOR" {
		t.Errorf("what was signed before is %s %s, want it refused", task.GetState(), task.GetReason())
	}
	if task := c.Do("system.command", node, command("since", "true")); task.GetState() != succeeded {
		t.Errorf("what was signed since ended as %s: %s", task.GetState(), task.GetMessage())
	}
	ran(t, c, node, "before", "0")
	ran(t, c, node, "since", "1")
}
