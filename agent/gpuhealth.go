package agent

import (
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	gpuhealth "github.com/gpuaas/millwright/agent/internal/health"
	"github.com/gpuaas/millwright/agent/internal/health/xid"
	"github.com/gpuaas/millwright/agent/internal/session"
	"github.com/gpuaas/millwright/agent/internal/state"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
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
