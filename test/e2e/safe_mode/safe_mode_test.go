// Package safe_mode shows on a real node what the agent does with a state that it
// must not touch, and with one that is damaged.
package safe_mode

import (
	"slices"
	"strings"
	"testing"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	stateDB = "/var/lib/millwright/state.db"

	queued    = taskv1.TaskState_TASK_STATE_QUEUED
	running   = taskv1.TaskState_TASK_STATE_RUNNING
	held      = taskv1.TaskState_TASK_STATE_HELD
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
)

// slow notes that it ran, and ends when it is told to.
func slow(name string) string {
	return `argv: [/bin/sh, -c, "echo run >> /root/` + name + `; until test -e /root/go-` + name + `; do sleep 0.1; done"]`
}

func TestSafeMode(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 1})
	t.Run("locked by another process", func(t *testing.T) { locked(t, c.With(t)) })
	t.Run("damaged", func(t *testing.T) { damaged(t, c.With(t)) })
}

// begin leaves a command running, and its agent stopped.
func begin(c *clustertest.Cluster, name string) (id string) {
	id = c.Start("system.command", "n1", slow(name))
	c.Await(id, running)
	c.Sh("n1", "until test -s /root/"+name+"; do sleep 0.1; done; systemctl stop millwrightd.service")
	return id
}

// condition waits until the server shows the node in safe mode, or not.
func condition(t *testing.T, c *clustertest.Cluster, on bool) *taskv1.Condition {
	t.Helper()
	for range 300 {
		node, err := c.Node(t.Context(), "n1")
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(node.GetConditions(), func(one *taskv1.Condition) bool {
			return one.GetType() == "SafeMode" && one.GetStatus() == taskv1.ConditionStatus_CONDITION_STATUS_TRUE
		})
		switch {
		case i < 0 && !on:
			return nil
		case i >= 0 && on && node.GetState() == nodev1.NodeState_NODE_STATE_CONNECTED:
			return node.GetConditions()[i]
		}
		c.Sh("n1", "sleep 0.1")
	}
	t.Fatalf("the node is not shown as in safe mode: %t", on)
	return nil
}

func locked(t *testing.T, c *clustertest.Cluster) {
	id := begin(c, "locked")
	c.Sh("n1", "systemd-run --quiet --unit=holder flock "+stateDB+" sleep 1000; until ! flock -n "+stateDB+" true; do sleep 0.1; done; systemctl start millwrightd.service")
	pid := strings.TrimSpace(c.Sh("n1", "systemctl show -P MainPID holder.service"))
	shown := condition(t, c, true)
	if shown.GetReason() != "STATE_LOCKED" || !strings.Contains(shown.GetMessage(), pid) {
		t.Errorf("condition = %v, want STATE_LOCKED with the process %s", shown, pid)
	}
	said := c.Sh("n1", "millwrightd status")
	if !strings.Contains(said, "safe mode") || !strings.Contains(said, pid) || !strings.Contains(said, "goes on by itself") {
		t.Errorf("millwrightd status = %q, want safe mode, the process, and what happens next", said)
	}
	later := c.Start("system.command", "n1", `argv: [/bin/sh, -c, "echo run >> /root/later"]`)
	c.Sh("n1", "sleep 8") // four heartbeats
	condition(t, c, true)
	if task := c.Await(later, queued); task.GetState() != queued {
		t.Errorf("the task that came meanwhile is %s", task.GetState())
	}
	if n := strings.TrimSpace(c.Sh("n1", "systemctl show -P NRestarts millwrightd.service")); n != "0" {
		t.Errorf("the agent was restarted %s times", n)
	}

	c.Sh("n1", "systemctl stop holder.service; touch /root/go-locked")
	for _, one := range []string{id, later} {
		if task := c.End(one); task.GetState() != succeeded {
			t.Errorf("with the lock gone task %s ended as %s: %s", one, task.GetState(), task.GetMessage())
		}
	}
	condition(t, c, false)
	if runs := c.Sh("n1", "cat /root/locked /root/later"); runs != "run\nrun\n" && strings.TrimSpace(runs) != "run\nrun" {
		t.Errorf("the commands ran %q, want once each", runs)
	}
	if now := strings.TrimSpace(c.Sh("n1", "ls /var/lib/millwright | grep -c 'state.db\\.' || true")); now != "0" {
		t.Errorf("%s files were set aside, want none", now)
	}
}

func damaged(t *testing.T, c *clustertest.Cluster) {
	id := begin(c, "damaged")
	c.Sh("n1", "truncate -s 20000 "+stateDB+"; cp "+stateDB+" /root/cut; systemctl start millwrightd.service")
	task := c.Await(id, held)
	if task.GetReason() != "JOURNAL_LOST" || !strings.Contains(task.GetMessage(), "millctl task resolve") {
		t.Errorf("the task is held with %s: %s; want JOURNAL_LOST and the way out", task.GetReason(), task.GetMessage())
	}
	if err := c.WaitConnected(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	c.Sh("n1", "cmp /root/cut /var/lib/millwright/state.db.*corrupt*")
	if n := strings.TrimSpace(c.Sh("n1", "systemctl show -P NRestarts millwrightd.service")); n != "0" {
		t.Errorf("the agent was restarted %s times", n)
	}
	if said := c.Sh("n1", "millwrightd journal check /root/cut && echo SOUND; true"); !strings.Contains(said, "DAMAGED") || strings.Contains(said, "SOUND") {
		t.Errorf("millwrightd journal check = %q, want it damaged and an error", said)
	}
	if said := c.Sh("n1", "millwrightd journal check"); !strings.Contains(said, "sound") {
		t.Errorf("millwrightd journal check of the new journal, beside its agent = %q", said)
	}
	if next := c.Do("system.command", "n1", `argv: [/bin/true]`); next.GetState() != succeeded {
		t.Errorf("a task that was signed afterwards ended as %s: %s", next.GetState(), next.GetMessage())
	}
	if runs := strings.TrimSpace(c.Sh("n1", "touch /root/go-damaged; cat /root/damaged")); runs != "run" {
		t.Errorf("the command ran %q, want once", runs)
	}
}
