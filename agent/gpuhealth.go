package agent

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	gpuhealth "github.com/gpuaas/millwright/agent/internal/health"
	"github.com/gpuaas/millwright/agent/internal/health/xid"
	nodehost "github.com/gpuaas/millwright/agent/internal/host"
	"github.com/gpuaas/millwright/agent/internal/session"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/mig"
)

// watchGPUs makes the monitor of the GPUs; none with gpu.mode off.
func (n *node) watchGPUs() error {
	if n.cfg.GPUMode == gpu.Off {
		return nil
	}
	table, err := xid.Builtin()
	if err != nil {
		return err
	}
	if table, err = table.With(n.cfg.XIDs); err != nil {
		return err
	}
	n.monitor = gpuhealth.New(gpuhealth.Config{
		Driver: n.gpus, Journal: edges{n}, Clock: n.cfg.Clock, Logger: n.log.With("component", "health"), BootID: n.bootID, XIDs: table,
		Period: n.cfg.GPUPeriod, SlowPeriod: n.cfg.GPUSlowPeriod, Expected: n.cfg.GPUExpected, KernelLog: n.cfg.KernelLog,
	})
	return nil
}

// gpuConditions is how tasks learn what the health rules say; nil with gpu.mode
// off.
func (n *node) gpuConditions() func(ctx context.Context) ([]*healthv1.Condition, error) {
	if n.cfg.GPUMode == gpu.Off {
		return nil
	}
	return func(ctx context.Context) ([]*healthv1.Condition, error) { return n.monitor.Look(ctx) }
}

// gpuIntents says of each intent in force that lays GPUs out whether it holds, by
// the word of its own kind.
func (n *node) gpuIntents(ctx context.Context) ([]host.GPUIntent, error) {
	var leaves []*taskv1.TaskLeaf
	var out []host.GPUIntent
	err := n.store.View(func(tx *state.Tx) error {
		return tx.Intents(func(in *agentv1.IntentRecord) error {
			leaf := &taskv1.TaskLeaf{}
			if err := proto.Unmarshal(in.GetSignedLeaf().GetLeaf(), leaf); err != nil {
				return fmt.Errorf("decode the leaf of intent %s: %w", in.GetKey(), err)
			}
			if in.GetState() == taskv1.IntentState_INTENT_STATE_ACTIVE && leaf.GetKind() == mig.ConfigureInfo().Kind {
				leaves, out = append(leaves, leaf), append(out, host.GPUIntent{Key: in.GetKey()})
			}
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	for i, leaf := range leaves {
		kind, err := n.cfg.Registry.Kind(leaf.GetKind())
		if err != nil {
			return nil, err
		}
		spec, err := kind.DecodeSpec(leaf.GetRevision(), leaf.GetSpec())
		if err == nil {
			err = kind.Verify(ctx, n.hosts.Prober(), spec)
		}
		if err != nil {
			out[i].Problem = err.Error()
		}
	}
	return out, nil
}

// awaitGPUChange waits until no change of the GPUs runs that an earlier life of the
// agent began: the program that samples would be in its way, and a reset fail for it.
func (a *Agent) awaitGPUChange(ctx context.Context) {
	if a.gpuProgram() == "" {
		return
	}
	if err := nodehost.AwaitGPUChange(ctx, a.cfg.StateDir, a.log); err != nil && ctx.Err() == nil {
		a.log.WarnContext(ctx, "GPUs are looked after although a change of them may go on", "err", err)
	}
}

// reports is what the session says of the GPUs; nil for nothing.
func (n *node) reports() session.Health {
	if n.monitor == nil {
		return nil
	}
	return n.monitor
}

// edges are the changes of the GPUs' conditions in the journal.
type edges struct{ node *node }

// Known is what was told.
func (e edges) Known() (k gpuhealth.Known, err error) {
	err = e.node.store.View(func(tx *state.Tx) error {
		k.Cursor.BootID, k.Cursor.Sequence = tx.HealthCursor()
		k.Edges, err = tx.Health()
		return err
	})
	return k, err
}

// Room reports whether edges may be numbered: where the server has been away for
// so long that tasks are deferred, they are folded.
func (e edges) Room() bool { return e.node.store.UnackedBytes() < executor.OutboxLimit }

// Tell numbers edges and remembers them, in one transaction.
func (e edges) Tell(c gpuhealth.Change) error {
	crash.Point("health.tell.before")
	err := e.node.store.Update(func(tx *state.Tx) error {
		for _, edge := range c.Edges {
			if _, err := tx.Append(&taskv1.Event{Payload: &taskv1.Event_Health{Health: edge}}); err != nil {
				return err
			}
			if err := remember(tx, edge); err != nil {
				return err
			}
		}
		tx.PutHealthCursor(c.Cursor.BootID, c.Cursor.Sequence)
		return nil
	})
	if err != nil {
		return err
	}
	crash.Point("health.tell.committed")
	return nil
}

func remember(tx *state.Tx, edge *healthv1.HealthEdge) error {
	if edge.GetForgotten() {
		tx.DeleteHealth(edge.GetCondition().GetKey())
		return nil
	}
	return tx.PutHealth(edge)
}

// gpus is whether work that needs the GPUs should come; nil where there are none.
func (h *health) gpus() *taskv1.Condition {
	if h.node.monitor == nil {
		return nil
	}
	r := h.node.monitor.Ready()
	if r == nil {
		return nil
	}
	c := &taskv1.Condition{Type: "GPUReady", Reason: r.Reason, Message: r.Message}
	switch r.State {
	case healthv1.State_STATE_OK:
		c.Status = taskv1.ConditionStatus_CONDITION_STATUS_TRUE
	case healthv1.State_STATE_RAISED:
		c.Status = taskv1.ConditionStatus_CONDITION_STATUS_FALSE
	default: // nobody knows
	}
	return c
}
