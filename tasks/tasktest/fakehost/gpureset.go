package fakehost

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// ResetGPUsOnce implements host.GPUResetter: what was begun for the step is found
// again, and of another boot nothing says how it ended.
func (v *view) ResetGPUsOnce(ctx context.Context, uuids []string, _ time.Duration) (host.GPUReset, error) {
	op := Op{Name: "ResetGPUsOnce", Object: strings.Join(uuids, ","), Change: true, Phase: Before}
	if err := v.hook(ctx, op); err != nil {
		return host.GPUReset{}, err
	}
	rec := v.n.beginReset(v.key, uuids)
	op.Phase = During
	if err := v.hook(ctx, op); err != nil {
		return host.GPUReset{}, err
	}
	v.n.mu.Lock()
	lost := !rec.ended && rec.boot != v.n.boot
	if !lost {
		rec.ended = true
	}
	v.n.mu.Unlock()
	if lost {
		return host.GPUReset{}, fmt.Errorf("reset GPU %s: %w", op.Object, host.ErrOutcomeUnknown)
	}
	if rec.said != nil {
		return rec.reset, rec.said
	}
	op.Phase = After
	return rec.reset, v.hook(context.WithoutCancel(ctx), op)
}

func (n *Node) beginReset(k commandKey, uuids []string) *command {
	n.mu.Lock()
	defer n.mu.Unlock()
	if old, ok := n.commands[k]; ok {
		return old
	}
	rec := &command{boot: n.boot}
	n.commands[k] = rec
	n.runs["nvidia-smi --gpu-reset -i "+strings.Join(uuids, ",")]++
	for _, uuid := range uuids {
		if rec.said = n.gpuFault("ResetGPUsOnce", uuid); rec.said != nil {
			return rec
		}
	}
	if rec.said = n.resetGPUs(uuids); rec.said == nil {
		rec.reset = host.GPUReset{Said: "All done.", Some: true, Outcome: host.Outcome{BootID: bootID(n.boot)}}
	}
	return rec
}

// CommandOutput implements host.Commander.
func (v *view) CommandOutput(ctx context.Context) ([]byte, error) {
	return call(ctx, v, Op{Name: "CommandOutput"}, func() ([]byte, error) {
		rec, ok := v.n.commands[v.key]
		if !ok || !rec.ended {
			return nil, errors.New("read the output of a command that has not ended")
		}
		return []byte(rec.result.Stdout), nil
	})
}

// GPUConditions implements host.GPUHealthReader.
func (v *view) GPUConditions(ctx context.Context) ([]host.GPUCondition, error) {
	return call(ctx, v, Op{Name: "GPUConditions"}, v.n.conditions)
}

// GPUIntents implements host.GPUHealthReader.
func (v *view) GPUIntents(ctx context.Context) ([]host.GPUIntent, error) {
	return call(ctx, v, Op{Name: "GPUIntents"}, func() ([]host.GPUIntent, error) { return slices.Clone(v.n.gpus.wants), nil })
}

// conditions are what the script says, and the driver's verdict on each GPU.
func (n *Node) conditions() ([]host.GPUCondition, error) {
	if n.gpus.blind {
		return nil, fmt.Errorf("ask what the health rules say: %w", host.ErrGPUDriver)
	}
	out := slices.Clone(n.gpus.health)
	for _, g := range n.gpus.all {
		if !g.present || g.lost {
			continue
		}
		c := host.GPUCondition{Code: "gpu.recovery_action", UUID: g.UUID, PCI: g.PCI, State: host.GPUConditionOK, Severity: host.GPUSeverityFatal}
		if g.Recovery != host.GPURecoveryNone {
			c.State, c.Reason, c.Message, c.Action = host.GPUConditionRaised, "DRIVER_VERDICT", "the driver asks: "+string(g.Recovery), "reset_gpu"
		}
		out = append(out, c)
	}
	return out, nil
}

// doHealth has the health rules say something.
func (n *Node) doHealth(a []string) error {
	if len(a) != 6 && len(a) != 4 {
		return errors.New("want health UUID|node CODE STATE SEVERITY [REASON MESSAGE]")
	}
	c := host.GPUCondition{Code: a[1], State: host.GPUConditionState(a[2]), Severity: host.GPUSeverity(a[3])}
	if len(a) == 6 {
		c.Reason, c.Message = a[4], a[5]
	}
	if a[0] != "node" {
		c.UUID = a[0]
	}
	n.gpus.health = append(n.gpus.health, c)
	return nil
}
