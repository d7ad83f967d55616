package harness_test

import (
	"slices"
	"testing"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
)

// TestSpine is the main job: a node joins with a bundle, an operator signs a
// command, the node runs it once, and the history tells it. Then the agent
// restarts, and another task runs in the same journal.
func TestSpine(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/true\nprogram /usr/bin/false\nresult exit=7 /usr/bin/false now"); err != nil {
		t.Fatal(err)
	}
	stop := n.Start()
	first := n.Connected()
	if first.GetFacts().GetHostname() == "" || first.GetBootId() != n.BootID() || len(first.GetKinds()) < 4 || first.GetSessionEpoch() == 0 {
		t.Errorf("node = %v, want its facts, boot, kinds and epoch", first)
	}

	task := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/true", "a b"}}).GetId())
	if task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED || len(task.GetSteps()) != 1 || task.GetAcceptTime() == nil {
		t.Errorf("task = %v, want it succeeded with one step", task)
	}
	if runs := n.Runs("/usr/bin/true", "a b"); runs != 1 {
		t.Errorf("the command ran %d times, want once", runs)
	}
	history(t, c, task.GetId(), "CREATED", "ASSIGNED", "ACCEPTED", "PLANNED", "STARTED", "SUCCEEDED")

	stop()
	defer n.Start()()
	failed := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/false", "now"}}).GetId())
	if failed.GetState() != taskv1.TaskState_TASK_STATE_FAILED || failed.GetReason() != "COMMAND_EXIT" {
		t.Errorf("task = %v, want it failed with COMMAND_EXIT", failed)
	}
	again := n.Connected()
	if again.GetJournalId() != first.GetJournalId() || again.GetSessionEpoch() <= first.GetSessionEpoch() {
		t.Errorf("after a restart journal %s in epoch %d, want %s in a later one than %d",
			again.GetJournalId(), again.GetSessionEpoch(), first.GetJournalId(), first.GetSessionEpoch())
	}
	if r, err := c.Nodes.ListNodes(t.Context(), &nodev1.ListNodesRequest{}); err != nil || len(r.GetNodes()) != 1 {
		t.Errorf("ListNodes() = %v, %v; want one node", r, err)
	}
}

// history checks that the kinds of events occur in this order; others may lie
// between them.
func history(t *testing.T, c *harness.Cluster, id string, want ...string) {
	t.Helper()
	r, err := c.Tasks.ListTaskEvents(t.Context(), &taskv1.ListTaskEventsRequest{Id: id})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range r.GetEvents() {
		got = append(got, e.GetType())
	}
	left := want
	for _, g := range got {
		if len(left) > 0 && g == left[0] {
			left = left[1:]
		}
	}
	if len(left) > 0 || slices.Index(got, want[0]) != 0 {
		t.Errorf("history = %v, want %v in this order", got, want)
	}
}
