package system_command

import (
	"fmt"
	"strings"
	"testing"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const policyFile = "/etc/millwright/policy.yaml"

// TestPolicy changes the policy of a node while tasks wait for it.
func TestPolicy(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 1})
	t.Run("an invalid file defers all, and stops nothing", func(t *testing.T) { invalidPolicy(t, c.With(t)) })
	t.Run("what was accepted is asked again at its start", func(t *testing.T) { deniedAtStart(t, c.With(t)) })
}

// setPolicy replaces the file, or removes it where the text is empty.
func setPolicy(t *testing.T, c *clustertest.Cluster, text string) {
	t.Helper()
	if text == "" {
		c.Sh("n1", "rm "+policyFile)
		return
	}
	if err := c.Machine("n1").WriteFile(t.Context(), policyFile, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// runs is how often a command with effect(name) was started.
func runs(c *clustertest.Cluster, name string) string {
	return c.Sh("n1", "cat /root/ran-"+name+" 2>/dev/null | wc -l")
}

// effect is a command whose starts can be counted, and that ends when told to.
func effect(name string) string {
	return fmt.Sprintf(`argv: [/bin/sh, -c, "echo run >> /root/ran-%[1]s; until test -e /root/go-%[1]s; do sleep 0.1; done"]`, name)
}

func release(c *clustertest.Cluster, name string) { c.Sh("n1", "touch /root/go-"+name) }

func invalidPolicy(t *testing.T, c *clustertest.Cluster) {
	running := c.Start("system.command", "n1", effect("before"))
	c.Await(running, taskv1.TaskState_TASK_STATE_RUNNING)
	for i, bad := range []struct{ text, word string }{
		{"version: 1\nrules:\n  - alow: system.command\n", "line 3"},
		{"", policyFile},
	} {
		name := fmt.Sprintf("bad%d", i)
		setPolicy(t, c, bad.text)
		release(c, name)
		ids := []string{c.Start("system.command", "n1", effect(name)), c.Start("storage.mount", "n1", "target: /mnt/"+name+"\ntmpfs: {size_bytes: 1048576}")}
		for _, id := range ids {
			task, err := c.WaitTask(t.Context(), id, time.Minute, func(task *taskv1.Task) bool { return deferred(task) != nil })
			if err != nil {
				t.Fatal(err)
			}
			if d := deferred(task); task.GetState() != taskv1.TaskState_TASK_STATE_QUEUED || d.GetReason() != "POLICY_INVALID" || !strings.Contains(d.GetMessage(), bad.word) {
				t.Errorf("task is %s with %v, want it queued and deferred with POLICY_INVALID that says %q", task.GetState(), d, bad.word)
			}
		}
		if n := runs(c, name); n != "0" {
			t.Errorf("without a policy a command ran %s times", n)
		}
		// A server that knew of it learns that all is well again, and sends at once.
		told(t, c)
		setPolicy(t, c, clustertest.AllowAll)
		for _, id := range ids {
			if task := c.End(id); task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
				t.Errorf("with a policy the task is %s: %s", task.GetState(), task.GetMessage())
			}
		}
		if n := runs(c, name); n != "1" {
			t.Errorf("the command ran %s times, want once", n)
		}
	}
	release(c, "before")
	if task := c.End(running); task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("what ran meanwhile is %s: %s", task.GetState(), task.GetMessage())
	}
}

// told waits until the server knows that the policy of the node is invalid.
func told(t *testing.T, c *clustertest.Cluster) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		n, err := c.Node(t.Context(), "n1")
		if err != nil {
			t.Fatal(err)
		}
		for _, cond := range n.GetConditions() {
			if cond.GetType() == "PolicyInvalid" && cond.GetStatus() == taskv1.ConditionStatus_CONDITION_STATUS_TRUE {
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("the node's conditions are %v, want PolicyInvalid", n.GetConditions())
		}
	}
}

func deferred(task *taskv1.Task) *taskv1.Condition {
	for _, c := range task.GetConditions() {
		if c.GetType() == "Deferred" {
			return c
		}
	}
	return nil
}

func deniedAtStart(t *testing.T, c *clustertest.Cluster) {
	id := c.Start("system.command", "n1", effect("late"), "--not-before", "8s")
	c.Await(id, taskv1.TaskState_TASK_STATE_ACCEPTED, taskv1.TaskState_TASK_STATE_WAITING)
	setPolicy(t, c, "version: 1\nrules:\n  - allow: storage.mount\n")
	task := c.End(id)
	if task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || task.GetReason() != "POLICY_DENIED" || task.GetAcceptTime() == nil || task.GetUndo() != taskv1.UndoState_UNDO_STATE_NOT_NEEDED {
		t.Errorf("task = %v, want that it was accepted and then refused with POLICY_DENIED", task)
	}
	if n := runs(c, "late"); n != "0" {
		t.Errorf("it ran %s times", n)
	}
	setPolicy(t, c, clustertest.AllowAll)
}
