package harness_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
)

const (
	queued    = taskv1.TaskState_TASK_STATE_QUEUED
	running   = taskv1.TaskState_TASK_STATE_RUNNING
	cancelled = taskv1.TaskState_TASK_STATE_CANCELLED
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	held      = taskv1.TaskState_TASK_STATE_HELD
)

// TestCancelAsItsCallerSeesIt cancels a task in each state that the server knows,
// from never sent to ended. Each row is what the caller is told at once, how the
// task ends, and how often its command ran. The phases within the node have their
// table in agent/internal/executor.
func TestCancelAsItsCallerSeesIt(t *testing.T) {
	for _, tc := range []struct {
		name  string
		bring func(t *testing.T, c *harness.Cluster, n *harness.Node) string // to the state; returns the task
		code  codes.Code
		says  string                // of the error
		told  taskv1.TaskState      // of the answer
		ends  taskv1.TaskState      // in the end
		goOn  func(n *harness.Node) // after the cancel
		runs  int
	}{
		{name: "queued", bring: neverSent, told: cancelled, ends: cancelled, goOn: func(n *harness.Node) { n.Start() }},
		{name: "put off by its node", bring: putOffByPolicy, told: cancelled, ends: cancelled, goOn: allowAll},
		{name: "running", bring: underWay, told: running, ends: cancelled, runs: 1},
		{name: "ended", bring: ended, code: codes.FailedPrecondition, says: "has ended as succeeded", ends: succeeded, runs: 1},
		{name: "held", bring: lost, code: codes.FailedPrecondition, says: "millctl task resolve", ends: held, runs: 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := harness.New(t)
			n := c.NewNode("gpu-001")
			if err := n.Do("program /usr/bin/work\nresult block /usr/bin/work block"); err != nil {
				t.Fatal(err)
			}
			id := tc.bring(t, c, n)
			r, err := c.Tasks.CancelTask(t.Context(), &taskv1.CancelTaskRequest{Id: id, Reason: "wrong node"})
			if status.Code(err) != tc.code || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("CancelTask = %v, want %v with %q", err, tc.code, tc.says)
			}
			if err == nil && (r.GetTask().GetState() != tc.told || !r.GetTask().GetCancelRequested()) {
				t.Errorf("CancelTask = %v, want it told as %v", r.GetTask(), tc.told)
			}
			if tc.goOn != nil {
				tc.goOn(n)
				n.Connected()
			}
			if task := c.Ended(id); task.GetState() != tc.ends {
				t.Errorf("task = %v, want it %v", task, tc.ends)
			}
			after := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", "after"}}).GetId())
			if after.GetState() != succeeded || n.Started() != tc.runs+1 {
				t.Errorf("a later task is %v; %d processes were started, want %d", after.GetState(), n.Started(), tc.runs+1)
			}
		})
	}
}

func create(c *harness.Cluster, n *harness.Node, arg string) string {
	return c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", arg}}).GetId()
}

func neverSent(_ *testing.T, c *harness.Cluster, n *harness.Node) string {
	stop := n.Start()
	n.Connected()
	stop()
	return create(c, n, "queued")
}

func putOffByPolicy(t *testing.T, c *harness.Cluster, n *harness.Node) string {
	n.Start()
	n.Connected()
	path := filepath.Join(n.Dir, "policy.yaml")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, path+".good", good)
	writeFile(t, path, []byte("version: 1\nrules: 7\n"))
	id := create(c, n, "deferred")
	await(t, "the task is put off", func() bool {
		task := c.Reached(id, 0)
		return task.GetState() == queued && slices.ContainsFunc(task.GetConditions(), func(c *taskv1.Condition) bool { return c.GetReason() == "POLICY_INVALID" })
	})
	return id
}

func allowAll(n *harness.Node) {
	path := filepath.Join(n.Dir, "policy.yaml")
	_ = os.Rename(path+".good", path) // what follows needs it, and says so
}

func underWay(t *testing.T, c *harness.Cluster, n *harness.Node) string {
	n.Start()
	n.Connected()
	return begun(t, c, n)
}

// begun is a command whose process runs: a task says that it is running a moment
// before.
func begun(t *testing.T, c *harness.Cluster, n *harness.Node) string {
	id := create(c, n, "block")
	c.Reached(id, running)
	await(t, "the command's process runs", func() bool { return n.Started() == 1 })
	return id
}

func ended(_ *testing.T, c *harness.Cluster, n *harness.Node) string {
	n.Start()
	n.Connected()
	return c.Ended(create(c, n, "ends")).GetId()
}

func lost(t *testing.T, c *harness.Cluster, n *harness.Node) string {
	stop := n.Start()
	n.Connected()
	id := begun(t, c, n)
	stop()
	if err := os.Remove(n.State("state.db")); err != nil {
		t.Fatal(err)
	}
	n.Start()
	c.Reached(id, held)
	return id
}

func writeFile(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}
