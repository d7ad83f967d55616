package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	// The specs and results are printed as their types.
	_ "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	_ "github.com/gpuaas/millwright/proto/millwright/system/v1"
)

// Terminal reports whether a task in the state has ended for good.
func Terminal(s taskv1.TaskState) bool {
	return s >= taskv1.TaskState_TASK_STATE_SUCCEEDED
}

// Run creates one task on each node with one signature, and returns their ids
// in the order of the nodes.
func (c *Cluster) Run(ctx context.Context, kind, nodes, spec string, flags ...string) ([]string, error) {
	args := append([]string{"task", "run", kind, "-n", nodes, "-f", "-", "-o", "json"}, flags...)
	out, err := c.MillctlInput(ctx, spec, args...)
	if err != nil {
		return nil, err
	}
	var resp taskv1.CreateTasksResponse
	if err := protojson.Unmarshal([]byte(out.Stdout), &resp); err != nil {
		return nil, fmt.Errorf("read what task run printed: %w\n%s", err, out.Stdout)
	}
	var ids []string
	for _, t := range resp.GetTasks() {
		ids = append(ids, t.GetId())
	}
	return ids, nil
}

// Task returns a task.
func (c *Cluster) Task(ctx context.Context, id string) (*taskv1.Task, error) {
	out, err := c.Millctl(ctx, "task", "get", id, "-o", "json")
	if err != nil {
		return nil, err
	}
	var t taskv1.Task
	return &t, decode(out.Stdout, &t)
}

// WaitTask waits until ok holds of a task.
func (c *Cluster) WaitTask(ctx context.Context, id string, limit time.Duration, ok func(*taskv1.Task) bool) (*taskv1.Task, error) {
	var last *taskv1.Task
	err := c.poll(ctx, limit, func() error {
		t, err := c.Task(ctx, id)
		if err != nil {
			return err
		}
		last = t
		if !ok(t) {
			return fmt.Errorf("task %s is %s: %s %s", id, t.GetState(), t.GetReason(), t.GetMessage())
		}
		return nil
	})
	return last, err
}

// WaitState waits until a task is in one of the states.
func (c *Cluster) WaitState(ctx context.Context, id string, limit time.Duration, states ...taskv1.TaskState) (*taskv1.Task, error) {
	return c.WaitTask(ctx, id, limit, func(t *taskv1.Task) bool { return slices.Contains(states, t.GetState()) })
}

// WaitEnd waits until a task has ended or is held.
func (c *Cluster) WaitEnd(ctx context.Context, id string, limit time.Duration) (*taskv1.Task, error) {
	return c.WaitTask(ctx, id, limit, func(t *taskv1.Task) bool {
		return Terminal(t.GetState()) || t.GetState() == taskv1.TaskState_TASK_STATE_HELD
	})
}

// Node returns a node as the server knows it.
func (c *Cluster) Node(ctx context.Context, name string) (*nodev1.Node, error) {
	out, err := c.Millctl(ctx, "node", "get", name, "-o", "json")
	if err != nil {
		return nil, err
	}
	var n nodev1.Node
	return &n, decode(out.Stdout, &n)
}

// WaitConnected waits until the server has a session of a node.
func (c *Cluster) WaitConnected(ctx context.Context, name string) error {
	return c.poll(ctx, 90*time.Second, func() error {
		n, err := c.Node(ctx, name)
		if err != nil {
			return err
		}
		if n.GetState() != nodev1.NodeState_NODE_STATE_CONNECTED {
			return fmt.Errorf("node %s is %s", name, n.GetState())
		}
		return nil
	})
}

// decode reads a message, or a response that holds only it.
func decode(text string, m proto.Message) error {
	if err := protojson.Unmarshal([]byte(text), m); err != nil {
		return fmt.Errorf("read what millctl printed: %w\n%s", err, strings.TrimSpace(text))
	}
	return nil
}

// History returns a task's events, the oldest first.
func (c *Cluster) History(ctx context.Context, id string) ([]*taskv1.TaskEvent, error) {
	out, err := c.Millctl(ctx, "task", "history", id, "-o", "json")
	if err != nil {
		return nil, err
	}
	var resp taskv1.ListTaskEventsResponse
	if err := decode(out.Stdout, &resp); err != nil {
		return nil, err
	}
	return resp.GetEvents(), nil
}
