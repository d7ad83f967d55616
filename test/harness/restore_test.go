package harness_test

import (
	"context"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
)

// TestRestoredServer puts back an older copy of the server's store. What its
// node did since is told again: of a task that the copy does not know, and of
// one that it takes to be in the queue. Neither runs again, and no watch goes on
// across the gap.
func TestRestoredServer(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/work"); err != nil {
		t.Fatal(err)
	}
	n.Start()
	n.Connected()
	create := func(arg string) string {
		return c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", arg}}).GetId()
	}
	c.Ended(create("known"))
	for _, tc := range []struct{ name, before, after string }{
		{"a task in the queue of the copy", "queued", ""},
		{"a task that the copy does not know", "", "unknown"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var ids, args []string
			if tc.before != "" {
				n.Cut()
				ids, args = append(ids, create(tc.before)), append(args, tc.before)
			}
			c.StopServer()
			copied, err := os.ReadFile(c.StoreFile())
			if err != nil {
				t.Fatal(err)
			}
			c.StartServer()
			n.Heal()
			if tc.after != "" {
				ids, args = append(ids, create(tc.after)), append(args, tc.after)
			}
			for _, id := range ids {
				if task := c.Ended(id); task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
					t.Fatalf("task = %v, want it succeeded", task)
				}
			}
			await(t, "the node has the acknowledgement", func() bool {
				for _, id := range ids {
					if !n.Journal(id).GetAcknowledged() {
						return false
					}
				}
				return true
			})
			token := watchToken(t, c)
			c.StopServer()
			if err := os.WriteFile(c.StoreFile(), copied, 0o600); err != nil {
				t.Fatal(err)
			}
			c.StartServer()
			for i, id := range ids {
				if task := c.Ended(id); task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED || len(task.GetSteps()) != 1 {
					t.Errorf("after the restore task = %v, want it succeeded with its step", task)
				}
				if runs := n.Runs("/usr/bin/work", args[i]); runs != 1 {
					t.Errorf("%s ran %d times, want once", args[i], runs)
				}
			}
			if err := watchFrom(t, c, token); status.Code(err) != codes.OutOfRange {
				t.Errorf("a watch from before the restore: %v, want OUT_OF_RANGE", err)
			}
			// The log goes on, beyond where the token was: it stays invalid.
			for range 3 {
				c.Ended(create("more"))
			}
			if err := watchFrom(t, c, token); status.Code(err) != codes.OutOfRange {
				t.Errorf("a watch from before the restore, later: %v, want OUT_OF_RANGE", err)
			}
		})
	}
}

func watchToken(t *testing.T, c *harness.Cluster) string {
	t.Helper()
	r, err := c.Tasks.ListTasks(t.Context(), &taskv1.ListTasksRequest{PageSize: 1})
	if err != nil {
		t.Fatal(err)
	}
	return r.GetWatchToken()
}

// watchFrom returns the error of the first answer of a watch, or nil.
func watchFrom(t *testing.T, c *harness.Cluster, token string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	stream, err := c.Tasks.WatchTasks(ctx, &taskv1.WatchTasksRequest{ResumeToken: token})
	if err != nil {
		return err
	}
	_, err = stream.Recv()
	return err
}
