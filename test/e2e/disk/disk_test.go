// Package disk shows on real nodes what a full, a read-only and a broken disk do.
package disk

import (
	"strings"
	"testing"
	"time"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/testbed"
)

const (
	running   = taskv1.TaskState_TASK_STATE_RUNNING
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED

	quick = "argv: [/bin/true]"
	// slow writes output until it is told to end.
	slow = `argv: [/bin/sh, -c, "echo ran >> /root/runs; until test -e /root/go; do echo line; sleep 0.05; done; echo end"]`
)

// watchdog is far below what each case takes.
const watchdog = "[Service]\nWatchdogSec=6\n"

// site is a cluster with one node, whose state is on a disk of its own.
type site struct {
	*clustertest.Cluster
	node *testbed.Node
	pid  string // of the agent
}

func up(t *testing.T) *site {
	t.Helper()
	c := clustertest.Up(t, clustertest.Config{Nodes: 1, Apart: true, StateMiB: 192})
	s := &site{Cluster: c, node: c.Machine("n1")}
	if err := c.Install(t.Context(), s.node); err != nil {
		t.Fatal(err)
	}
	if err := s.node.WriteFile(t.Context(), "/etc/systemd/system/millwrightd.service.d/watchdog.conf", []byte(watchdog), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := c.Enrol(t.Context(), s.node); err != nil {
		t.Fatal(err)
	}
	s.pid = s.agentPID()
	return s
}

func (s *site) with(t *testing.T) *site {
	sub := *s
	sub.Cluster = s.With(t)
	return &sub
}

func (s *site) agentPID() string { return s.Sh("n1", "systemctl show -P MainPID millwrightd.service") }

// sick waits until the operator sees that the node's disk is.
func (s *site) sick(t *testing.T) {
	t.Helper()
	s.unwritable(t, "DISK_FULL", "make room")
}

// unwritable waits until the operator sees that the node's journal is, and why.
func (s *site) unwritable(t *testing.T, reason, says string) {
	t.Helper()
	var last *nodev1.Node
	s.until(t, "the node says that its journal cannot be written", func() bool {
		n, err := s.Node(t.Context(), "n1")
		if err != nil {
			t.Fatal(err)
		}
		last = n
		for _, c := range n.GetConditions() {
			if c.GetType() == "JournalUnwritable" && c.GetStatus() == taskv1.ConditionStatus_CONDITION_STATUS_TRUE {
				return c.GetReason() == reason && strings.Contains(c.GetMessage(), says)
			}
		}
		return false
	})
	if last.GetState() != nodev1.NodeState_NODE_STATE_CONNECTED {
		t.Errorf("the node is %s", last.GetState())
	}
}

// waits creates a task that must wait for room, and say so.
func (s *site) waits(t *testing.T) string {
	t.Helper()
	id := s.Start("system.command", "n1", quick)
	s.until(t, "a new task waits for room", func() bool {
		task, err := s.Task(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range task.GetConditions() {
			if c.GetReason() == "DISK_FULL" && strings.Contains(c.GetMessage(), "disk of the node") {
				return true
			}
		}
		return false
	})
	out, err := s.Millctl(t.Context(), "task", "get", id)
	if err != nil || !strings.Contains(out.Stdout, "DISK_FULL") || !strings.Contains(out.Stdout, "disk of the node") {
		t.Errorf("millctl task get does not say why the task waits and what to do: %v\n%s", err, out.Stdout)
	}
	return id
}

// lives checks over two watchdog times that the agent is there and connected.
func (s *site) lives(t *testing.T) {
	t.Helper()
	end := time.Now().Add(13 * time.Second)
	s.until(t, "two watchdog times pass", func() bool {
		n, err := s.Node(t.Context(), "n1")
		if err != nil {
			t.Fatal(err)
		}
		if n.GetState() != nodev1.NodeState_NODE_STATE_CONNECTED {
			t.Fatalf("the node is %s", n.GetState())
		}
		return time.Now().After(end)
	})
	s.same(t)
}

func (s *site) same(t *testing.T) {
	t.Helper()
	if pid := s.agentPID(); pid != s.pid {
		t.Errorf("the agent was process %s and is %s: it was restarted", s.pid, pid)
	}
}

func (s *site) until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(2 * time.Minute); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("in two minutes it did not come about that %s", what)
		}
	}
}

// honest checks that a task ended well, was never undone, and that its command
// ran as often as the node has noted.
func (s *site) honest(t *testing.T, id string) {
	t.Helper()
	if task := s.End(id); task.GetState() != succeeded {
		t.Errorf("task is %s: %s %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	for _, e := range s.Events(id) {
		if e.GetNodeEvent().GetUndoing() != nil {
			t.Errorf("the task was turned to undo: %v", e)
		}
	}
}

func TestDisk(t *testing.T) {
	s := up(t)
	t.Run("full", func(t *testing.T) { full(t, s.with(t)) })
	t.Run("full in the middle of mounts", func(t *testing.T) { mounts(t, s.with(t)) })
	t.Run("state file moved away", func(t *testing.T) { moved(t, s.with(t)) })
	t.Run("read-only", func(t *testing.T) { broken(t, s.with(t), s.node.FailDisk, "read-only file system") })
	t.Run("gone", func(t *testing.T) { broken(t, s.with(t), s.node.BreakDisk, "input/output error") })
}

func full(t *testing.T, s *site) {
	s.Sh("n1", "rm -f /root/runs /root/go")
	var before []string
	for range 8 {
		before = append(before, s.Start("system.command", "n1", slow))
	}
	for _, id := range before {
		s.Await(id, running)
	}
	s.Sh("n1", "until test $(wc -l < /root/runs) = 8; do sleep 0.1; done")
	if err := s.node.Fill(t.Context(), testbed.StateDir, 0); err != nil {
		t.Fatal(err)
	}
	if kept := s.Sh("n1", "f="+testbed.StateDir+"/state.db; test $(($(stat -c '%b * %B - %s' $f))) -ge 12000000 && echo kept"); kept != "kept" {
		t.Error("the journal has no room of its own behind its end")
	}
	if free := s.Sh("n1", "stat -f -c %a "+testbed.StateDir); free != "0" {
		t.Fatalf("%s blocks are free", free)
	}
	s.sick(t)
	later := s.waits(t)
	s.lives(t)
	// What runs ends, and its result comes home, while there is no room.
	s.Sh("n1", "touch /root/go")
	for _, id := range before {
		s.honest(t, id)
	}
	// The commands' own reserves are all that came free.
	if free := s.Sh("n1", "test $(stat -f -c %a "+testbed.StateDir+") -lt 8192 && echo little"); free != "little" {
		t.Error("there was room when the task ended")
	}
	if err := s.node.Free(t.Context(), testbed.StateDir); err != nil {
		t.Fatal(err)
	}
	s.honest(t, later)
	if runs := s.Sh("n1", "wc -l < /root/runs"); runs != "8" {
		t.Errorf("eight commands ran %s times", runs)
	}
	s.same(t)
}

// mounts fills the disk while the node mounts and unmounts.
func mounts(t *testing.T, s *site) {
	var ids []string
	for _, target := range []string{"/mnt/a", "/mnt/b", "/mnt/c", "/mnt/d"} {
		ids = append(ids, s.Start("storage.mount", "n1", "tmpfs: {size_bytes: 1048576}\ntarget: "+target))
		if len(ids) == 2 {
			if err := s.node.Fill(t.Context(), testbed.StateDir, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	s.sick(t)
	s.lives(t)
	if err := s.node.Free(t.Context(), testbed.StateDir); err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		s.honest(t, id)
	}
	s.same(t)
}

// gone takes the disk away while a command writes, and brings it back.
// broken fails every write to the disk until the node has another one and boots.
func broken(t *testing.T, s *site, fail func() error, says string) {
	s.pid = s.agentPID() // the node may have booted since
	s.Sh("n1", "rm -f /root/runs /root/go")
	before := s.Start("system.command", "n1", slow)
	s.Await(before, running)
	s.Sh("n1", "until test -s /root/runs; do sleep 0.1; done")
	if err := fail(); err != nil {
		t.Fatal(err)
	}
	later := s.waits(t)
	s.unwritable(t, "WRITE_FAILED", says)
	s.lives(t)
	if err := s.node.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.node.ReplaceDisk(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.node.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.WaitConnected(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	// Nobody saw how the command ended: it is held, and never run again.
	if task := s.End(before); task.GetState() != taskv1.TaskState_TASK_STATE_HELD {
		t.Errorf("task is %s: %s %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	if runs := s.Sh("n1", "wc -l < /root/runs"); runs != "1" {
		t.Errorf("the command ran %s times", runs)
	}
	s.honest(t, later)
	if log := s.Sh("n1", "journalctl -b -u millwrightd.service"); strings.Contains(log, "new journal") {
		t.Errorf("a new journal began: the one on the disk was behind what was acknowledged")
	}
}

// moved takes the state file away from under the running agent: it says so, and
// tells the server nothing that the next start would not find. Put back, all goes
// on.
func moved(t *testing.T, s *site) {
	s.Sh("n1", "rm -f /root/runs /root/go")
	id := s.Start("system.command", "n1", slow)
	s.Await(id, running)
	s.Sh("n1", "until test -s /root/runs; do sleep 0.1; done; mv "+testbed.StateDir+"/state.db "+testbed.StateDir+"/state.db.away")
	s.unwritable(t, "WRITE_FAILED", testbed.StateDir+"/state.db was removed or renamed")
	later := s.waits(t)
	s.Sh("n1", "touch /root/go")
	s.lives(t)
	if task, err := s.Task(t.Context(), id); err != nil || task.GetState() != running {
		t.Errorf("the task is %s, although its node could not write its end down (%v)", task.GetState(), err)
	}
	s.Sh("n1", "mv "+testbed.StateDir+"/state.db.away "+testbed.StateDir+"/state.db")
	s.honest(t, id)
	s.honest(t, later)
	if runs := s.Sh("n1", "wc -l < /root/runs"); runs != "1" {
		t.Errorf("one command ran %s times", runs)
	}
	s.same(t)
}
