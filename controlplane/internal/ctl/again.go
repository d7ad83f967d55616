package ctl

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const resolveKind = "task.resolve"

func (a *app) taskRetryCmd() *cobra.Command {
	o := &signOptions{}
	cmd := &cobra.Command{
		Use:   "retry ID",
		Short: "Sign an ended task again, as a new task",
		Long: `Sign an ended task again, as a new task with an id of its own, for the same node
with the same spec and options.

What is signed comes from the leaf that was signed the first time, and only
after its signature is verified here: the server is not believed.`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			window, err := o.window(a.now())
			if err != nil {
				return err
			}
			return a.online(func(ctx context.Context, c *client, args []string) error {
				leaf, err := c.retryLeaf(ctx, args[0])
				if err != nil {
					return err
				}
				if o.reason != "" {
					leaf.Reason = o.reason
				}
				resp, err := a.submit(ctx, c, []*taskv1.TaskLeaf{leaf}, o, window)
				if err != nil {
					return err
				}
				return a.conclude(resp, o.wait)
			})(cmd, args)
		},
	}
	o.flags(cmd)
	a.outputFlag(cmd, formatName)
	return cmd
}

// retryLeaf returns the leaf of a new task that does what an ended one was to
// do.
func (c *client) retryLeaf(ctx context.Context, id string) (*taskv1.TaskLeaf, error) {
	resp, err := c.getTask(ctx, id)
	if err != nil {
		return nil, err
	}
	t := resp.GetTask()
	if !terminal(t.GetState()) {
		return nil, &failure{code: exitConflict, err: fmt.Errorf("retry task %s: it is %s; only a task that has ended can be tried again: %s",
			t.GetId(), word(t.GetState()), endFirst(t))}
	}
	verified, err := c.signedTask(resp)
	if err != nil {
		return nil, fmt.Errorf("retry task %s: %w", t.GetId(), err)
	}
	leaf := proto.CloneOf(verified.Leaf)
	if leaf.GetKind() == resolveKind {
		return nil, usagef("retry task %s: a %s is not tried again; use: millctl task resolve", t.GetId(), resolveKind)
	}
	leaf.RetryOf = leaf.GetTaskId()
	// The plan that was approved was the one for the node as it was then.
	leaf.PlanDigest = nil
	leaf.TaskId, err = newTaskID()
	return leaf, err
}

// signedTask verifies what the server says was signed.
func (c *client) signedTask(resp *taskv1.GetTaskResponse) (*trustroot.Verified, error) {
	verified, err := c.home.Root().VerifyTaskSet(resp.GetEnvelope(), resp.GetSignedLeaf())
	if err != nil {
		return nil, fmt.Errorf("the server shows no valid signature of it: %w; sign it anew with: millctl task run", err)
	}
	t, leaf := resp.GetTask(), verified.Leaf
	if leaf.GetTaskId() != t.GetId() || leaf.GetNode() != t.GetNode() || leaf.GetKind() != t.GetKind() {
		return nil, fmt.Errorf("the server shows the signature of another task, %s (%s on %s); do not trust it", leaf.GetTaskId(), leaf.GetKind(), leaf.GetNode())
	}
	return verified, nil
}

func (a *app) taskResolveCmd() *cobra.Command {
	o := &signOptions{}
	var as string
	cmd := &cobra.Command{
		Use:   "resolve ID --as undo|accept|abandon",
		Short: "Settle a held task by your signed word",
		Long: `Settle a held task by your signed word, which is a task of kind task.resolve for
the same node.

undo undoes its steps on the node, as far as they can be undone; it ends failed
and says what was not undone. accept counts it as succeeded: a kind with a goal must pass its check on the
node; of an action you assert that it was done. abandon gives it up as it is.`,
		Example: `  millctl task resolve 0192f7a1 --as abandon --reason 'node was reinstalled' --wait`,
		Args:    exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			window, err := o.window(a.now())
			if err != nil {
				return err
			}
			how, err := resolveAs(as)
			if err != nil {
				return err
			}
			return a.online(func(ctx context.Context, c *client, args []string) error {
				return a.resolve(ctx, c, args[0], how, o, window)
			})(cmd, args)
		},
	}
	cmd.Flags().StringVar(&as, "as", "", "how to settle it: undo, accept or abandon")
	o.flags(cmd)
	a.outputFlag(cmd, formatName)
	return cmd
}

func resolveAs(s string) (taskv1.ResolveAs, error) {
	switch s {
	case "undo":
		return taskv1.ResolveAs_RESOLVE_AS_UNDO, nil
	case "accept":
		return taskv1.ResolveAs_RESOLVE_AS_ACCEPT, nil
	case "abandon":
		return taskv1.ResolveAs_RESOLVE_AS_ABANDON, nil
	case "":
		return 0, usagef("--as is missing: say --as undo, --as accept or --as abandon")
	}
	return 0, usagef("--as: %q: must be one of undo, accept, abandon", s)
}

func (a *app) resolve(ctx context.Context, c *client, id string, how taskv1.ResolveAs, o *signOptions, window envelope.Window) error {
	got, err := c.getTask(ctx, id)
	if err != nil {
		return err
	}
	t := got.GetTask()
	if t.GetState() != taskv1.TaskState_TASK_STATE_HELD {
		return &failure{code: exitConflict, err: fmt.Errorf("resolve task %s: it is %s; only a held task is settled", t.GetId(), word(t.GetState()))}
	}
	leaf, err := a.resolveLeaf(t, how, o.reason)
	if err != nil {
		return err
	}
	resp, err := a.submit(ctx, c, []*taskv1.TaskLeaf{leaf}, o, window)
	if err != nil {
		return err
	}
	if !o.wait {
		a.remark("task %s is settled, or its undo begins, when the node has taken this one; see it with: millctl task get %s", t.GetId(), t.GetId())
	}
	return a.conclude(resp, o.wait)
}

func (a *app) resolveLeaf(t *taskv1.Task, how taskv1.ResolveAs, reason string) (*taskv1.TaskLeaf, error) {
	kind, err := a.registry.Kind(resolveKind)
	if err != nil {
		return nil, err
	}
	spec := &taskv1.ResolveSpec{TaskId: t.GetId(), LeafHash: t.GetLeafHash(), As: how}
	if err := kind.Validate(spec); err != nil {
		return nil, fmt.Errorf("resolve task %s: %w", t.GetId(), err)
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("encode spec of %s: %w", resolveKind, err)
	}
	id, err := newTaskID()
	if err != nil {
		return nil, err
	}
	return &taskv1.TaskLeaf{
		TaskId: id, Node: t.GetNode(), Mode: taskv1.Mode_MODE_EXECUTE, Kind: kind.Kind, Revision: kind.Needs(spec),
		Spec: b, Project: t.GetProject(), Reason: reason,
	}, nil
}

// endFirst is the way to an end of a task that has none.
func endFirst(t *taskv1.Task) string {
	if t.GetState() == taskv1.TaskState_TASK_STATE_HELD {
		return "settle it first, with millctl task resolve " + t.GetId() + " --as abandon --reason '...'"
	}
	return "wait for it, or end it with millctl task cancel " + t.GetId()
}
