package executor

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// The codes of what keeps a node from rebooting over and over.
const (
	reasonRebootBudget = "REBOOT_BUDGET"
	reasonRebootLoop   = "REBOOT_LOOP"
)

// RebootBudget bounds the reboots that tasks ask for.
type RebootBudget struct {
	// Most is how many there may be within Within; 0 means none.
	Most int
	// Within is a time by the wall clock.
	Within time.Duration
}

const (
	// strayBoots is how often the node may boot in the middle of a task without
	// that task having asked for it. After that the task may be what brings it
	// down, and is not carried on.
	strayBoots = 3
	// tellFor is how long a reboot waits until the server knows of it.
	tellFor = 3 * time.Second
)

func reboots(p *taskv1.Plan) int {
	n := 0
	for _, s := range p.GetSteps() {
		if s.GetEffect() == taskv1.Effect_EFFECT_REBOOT {
			n++
		}
	}
	return n
}

// loops says why a task is not carried on after one more boot, or nothing.
func (t *task) loops() string {
	stray := int(t.rec.GetBoots()) - reboots(t.plan)
	if stray <= strayBoots {
		return ""
	}
	return fmt.Sprintf("the node has booted %d times while this task ran, %d more often than the task asks for: it may be what brings the node down; "+
		"see why with journalctl --list-boots, then settle the task with task resolve", t.rec.GetBoots(), stray)
}

// rebootBudget refuses a plan that would reboot the node once too often.
func (t *task) rebootBudget(plan *taskv1.Plan) (*gate.Refusal, error) {
	if reboots(plan) == 0 || t.planOnly() {
		return nil, nil
	}
	budget := t.e.cfg.Reboots
	var log *agentv1.RebootLog
	err := t.e.cfg.Journal.View(func(tx *state.Tx) (err error) {
		log, err = tx.Reboots()
		return err
	})
	if err != nil {
		return nil, err
	}
	recent := t.e.recent(log)
	if len(recent)+reboots(plan) <= budget.Most {
		return nil, nil
	}
	when := "no task may reboot it"
	if len(recent) > 0 {
		when = fmt.Sprintf("the next may follow after %s", recent[0].GetTime().AsTime().Add(budget.Within).UTC().Format(time.RFC3339))
	}
	return &gate.Refusal{Reason: reasonRebootBudget, Message: fmt.Sprintf(
		"tasks have rebooted this node %d times within %v, and %d are allowed: %s; reboot it by hand, or raise reboots.most in agent.yaml",
		len(recent), budget.Within, budget.Most, when)}, nil
}

// recent are the reboots that count. One that seems to be in the future does:
// the clock was set back.
func (e *Executor) recent(log *agentv1.RebootLog) []*agentv1.RebootEntry {
	since := e.cfg.Clock.Now().Add(-e.cfg.Reboots.Within)
	return slices.DeleteFunc(slices.Clone(log.GetReboots()), func(r *agentv1.RebootEntry) bool {
		return !r.GetTime().AsTime().After(since)
	})
}

// countReboot notes, once for each task, that it reboots the node.
func (t *task) countReboot(tx *state.Tx) error {
	log, err := tx.Reboots()
	if err != nil {
		return err
	}
	if slices.ContainsFunc(log.GetReboots(), func(r *agentv1.RebootEntry) bool { return r.GetTaskId() == t.id }) {
		return nil
	}
	return tx.PutReboots(&agentv1.RebootLog{Reboots: append(t.e.recent(log), &agentv1.RebootEntry{
		TaskId: t.id, Time: timestamppb.New(t.e.cfg.Clock.Now()), BootId: t.e.cfg.BootID,
	})})
}

// tellFirst gives the server time to hear of a reboot before it happens. It is
// no reason not to reboot that it does not.
func (t *task) tellFirst(ctx context.Context, p *taskv1.PlannedStep) {
	if p.GetEffect() != taskv1.Effect_EFFECT_REBOOT {
		return
	}
	for end := t.e.cfg.Clock.Boot() + tellFor; t.e.cfg.Journal.UnackedBytes() > 0 && t.e.cfg.Clock.Boot() < end; {
		if !clock.Sleep(ctx, 50*time.Millisecond) {
			return
		}
	}
}
