package harness_test

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
)

// refusedToken wants a plain token for a name that has joined to be refused with
// what to do.
func refusedToken(t *testing.T, c *harness.Cluster, n *harness.Node) {
	t.Helper()
	_, err := c.Nodes.CreateJoinToken(t.Context(), &nodev1.CreateJoinTokenRequest{Node: n.Name})
	if status.Code(err) != codes.AlreadyExists || !strings.Contains(err.Error(), "--rejoin") {
		t.Errorf("CreateJoinToken of a name that has joined = %v, want it refused with --rejoin", err)
	}
}

// TestRejoinOfAHostMadeAnew wipes a host while a command runs on it. By a
// person's word it joins again under its old name: the former key is out, what may
// have run is held and not run again, and the node works.
func TestRejoinOfAHostMadeAnew(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/work\nresult block /usr/bin/work 1"); err != nil {
		t.Fatal(err)
	}
	stop := n.Start()
	before := n.Connected()
	under := c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", "1"}}).GetId()
	c.Reached(under, taskv1.TaskState_TASK_STATE_RUNNING)
	await(t, "the command's process runs", func() bool { return n.Started() == 1 })
	stop()
	former := t.TempDir()
	if err := os.CopyFS(former, os.DirFS(n.State(""))); err != nil {
		t.Fatal(err)
	}
	wipe(t, n)
	refusedToken(t, c, n)
	if _, err := c.Nodes.CreateJoinToken(t.Context(), &nodev1.CreateJoinTokenRequest{Node: "gpu-002", Rejoin: true}); status.Code(err) != codes.NotFound {
		t.Errorf("CreateJoinToken to rejoin under a name that never joined = %v, want it refused", err)
	}
	n.NewBundle()
	stop = n.Start()
	await(t, "the node is back", func() bool { return n.Connected().GetGeneration() == before.GetGeneration()+1 })
	task := c.Ended(under)
	if task.GetState() != taskv1.TaskState_TASK_STATE_HELD || task.GetReason() != "JOURNAL_LOST" {
		t.Errorf("the task that was under way is %s: %s, want it held with JOURNAL_LOST", task.GetState(), task.GetReason())
	}
	next := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", "2"}}).GetId())
	if next.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED || n.Runs("/usr/bin/work", "2") != 1 || n.Started() != 2 {
		t.Errorf("the next task is %s, and %d processes were started, want one of each command", next.GetState(), n.Started())
	}
	c.Settled(n)
	stop()

	// The former host comes back with its key and its journal, and without a bundle.
	wipe(t, n)
	if err := os.CopyFS(n.State(""), os.DirFS(former)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(n.State("../join.json")); err != nil {
		t.Fatal(err)
	}
	n.Start()
	answering(t, n)
	await(t, "the former host is told that it is out", func() bool {
		return strings.Contains(n.Status().GetConnectionError(), "has joined under this name since")
	})
	if n.Status().GetConnected() {
		t.Error("the former key is let in")
	}
	n.Gone("it has the key of a former enrolment")
}

// answering waits until the agent answers on its socket.
func answering(t *testing.T, n *harness.Node) {
	t.Helper()
	await(t, "the agent answers", func() bool {
		conn, err := new(net.Dialer).DialContext(t.Context(), "unix", filepath.Join(n.Dir, "run", "agent.sock"))
		if err != nil {
			return false
		}
		return conn.Close() == nil
	})
}

func wipe(t *testing.T, n *harness.Node) {
	t.Helper()
	if err := os.RemoveAll(n.State("")); err != nil {
		t.Fatal(err)
	}
}

// TestRejoinAfterAMonth keeps a node away until its certificate cannot be replaced
// by itself. It says what a person has to do, and comes back when that is done.
func TestRejoinAfterAMonth(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/work"); err != nil {
		t.Fatal(err)
	}
	stop := n.Start()
	before := n.Connected()
	stop()
	c.Pass(40 * 24 * time.Hour)
	stop = n.Start()
	answering(t, n)
	await(t, "the node says what to do", func() bool {
		return slices.ContainsFunc(n.Status().GetConditions(), func(c *taskv1.Condition) bool {
			return c.GetReason() == "IDENTITY_EXPIRED" && strings.Contains(c.GetMessage(), "millctl node token create gpu-001 --rejoin")
		})
	})
	refusedToken(t, c, n)
	stop()
	n.NewBundle()
	n.Start()
	await(t, "the node is back", func() bool { return n.Connected().GetGeneration() == before.GetGeneration()+1 })
	task := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", "1"}}).GetId())
	if task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("task = %v, want it succeeded", task)
	}
}
