package executor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// How soon a step that waits for others looks again: soon at first, and seldom
// once that has gone on for long.
const (
	firstLook = time.Second
	maxLook   = 15 * time.Second
)

// lookLater notes that a step waits for others, and for whom. It returns false
// when its time for that is over. A restart does not begin that time anew.
func (t *task) lookLater(ctx context.Context, i int, err error) (bool, error) {
	sr, planned := t.steps[i], t.plan.GetSteps()[i]
	if sr.GetWaitBegan() == nil {
		sr.WaitBegan = durationpb.New(t.spent())
	}
	waited := max(0, t.spent()-sr.GetWaitBegan().AsDuration())
	left := min(planned.GetWaitMost().AsDuration()-waited, t.remaining()-firstLook)
	if left <= 0 || t.cancel.isOn() {
		return false, nil
	}
	news := sr.GetError() != err.Error()
	sr.Error = err.Error()
	t.wait(i, min(max(waited/8, firstLook), maxLook, left))
	if err := t.tellWait(i, err, news); err != nil {
		return true, err
	}
	if news {
		t.log.InfoContext(ctx, "step waits", "step", i, "at_most", left, "why", err)
	}
	return true, nil
}

// tellWait makes a wait durable, and tells the server when it is for others than
// before, as long as there is room to tell how the task goes on.
func (t *task) tellWait(i int, why error, news bool) error {
	err := t.e.update(func(tx *state.Tx) error {
		if err := tx.PutStep(t.id, uint32(i), t.steps[i]); err != nil || !news {
			return err
		}
		rec, err := tx.Task(t.id)
		if err != nil || rec.GetEvents() >= maxWithSteps-1 { // the step's end is told too
			return err
		}
		ev := &taskv1.StepWaiting{TaskId: t.id, Step: uint32(i), Message: why.Error()}
		var known *tasks.ReasonError
		if errors.As(why, &known) {
			ev.Reason = known.Reason
		}
		if err := t.emitOptional(tx, rec, &taskv1.Event{Payload: &taskv1.Event_StepWaiting{StepWaiting: ev}}); err != nil {
			return err
		}
		return tx.PutTask(rec)
	})
	if err == nil {
		crash.Point("executor.step.waits")
	}
	return err
}

// waitedFor says how long a step has waited in vain.
func waitedFor(p *taskv1.PlannedStep, sr *agentv1.StepRecord) string {
	if sr.GetWaitBegan() == nil {
		return ""
	}
	return fmt.Sprintf("waited for, %v at most, and in vain: ", p.GetWaitMost().AsDuration())
}

// ownEnd is the first step behind the kind's own ones, which gives the node back
// to those who were asked for it; -1 when there is none.
func (t *task) ownEnd() int {
	steps := t.plan.GetSteps()
	end := len(steps)
	for end > 0 && steps[end-1].GetGate() {
		end--
	}
	if end == len(steps) || end == 0 {
		return -1
	}
	return end
}

// checkOwn verifies the whole before the node is given back: what fails after
// that would be undone under the eyes of new jobs.
func (t *task) checkOwn(ctx context.Context, i int) error {
	if t.steps[i].GetPhase() != taskv1.StepPhase_STEP_PHASE_UNSPECIFIED {
		return nil
	}
	limited, done := t.reading(ctx)
	defer done()
	err := t.check(limited, func() error { return t.kind.Verify(limited, t.e.cfg.Hosts.Prober(), t.spec) })
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return &failure{reason: reasonVerifyFailed, message: "after its steps the node is not as it should be: " + err.Error(), step: -1}
	}
	return nil
}
