package executor

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/clock"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// maxBackOff bounds the wait between two tries.
const maxBackOff = 10 * time.Minute

// spent is how much of the task's time has passed. It goes on over a restart
// and a reboot, and is never negative.
func (t *task) spent() time.Duration {
	return max(0, t.e.cfg.Clock.Boot()-t.rec.GetStartBootTime().AsDuration())
}

// repeatable reports whether a step may be tried again when it failed.
func repeatable(p *taskv1.PlannedStep) bool {
	return p.GetEffect() == taskv1.Effect_EFFECT_IDEMPOTENT || p.GetEffect() == taskv1.Effect_EFFECT_CHECK_THEN_ACT
}

// again notes that a try has failed and that there will be another, if there may
// be one: the step says how often, the error that it may pass, and the count is
// in the journal, so that no restart begins it anew.
func (t *task) again(ctx context.Context, i int, err error) (bool, error) {
	sr, planned := t.steps[i], t.plan.GetSteps()[i]
	if tasks.IsWait(err) && ctx.Err() == nil {
		return t.lookLater(ctx, i, err)
	}
	if !repeatable(planned) || !tasks.IsTransient(err) || ctx.Err() != nil || errors.Is(err, errHangs) ||
		sr.GetFailures()+1 >= planned.GetMaxAttempts() {
		return false, nil //nolint:nilerr // the caller has the error, and the step fails by it
	}
	sr.Failures++
	wait := backOff(planned, sr.GetFailures())
	if wait >= t.remaining() {
		return false, nil // it would only wait for its deadline
	}
	sr.Error = fmt.Sprintf("attempt %d of %d: %v", sr.GetFailures(), planned.GetMaxAttempts(), err)
	t.wait(i, wait)
	if err := t.putStep(i); err != nil {
		return true, err
	}
	t.log.WarnContext(ctx, "step is tried again", "step", i, "failures", sr.GetFailures(), "again_in", wait, "err", err)
	return true, nil
}

// backOff doubles with each failure.
func backOff(p *taskv1.PlannedStep, failures uint32) time.Duration {
	wait := float64(p.GetBackOff().AsDuration()) * math.Pow(2, float64(failures-1))
	return time.Duration(max(0, min(wait, float64(maxBackOff))))
}

// wait notes in the step's record that it waits. The caller makes it durable.
func (t *task) wait(i int, d time.Duration) {
	t.steps[i].RetryAt, t.steps[i].RetryWait = durationpb.New(t.spent()+d), durationpb.New(d)
}

// await waits until a step is to be tried. The end of the wait is a point in the
// task's time, so that a crash neither shortens nor begins it anew; however a
// clock was set meanwhile, it is never longer than it was. A cancel or the end
// of the task's time ends it.
func (t *task) await(ctx context.Context, i int) error {
	sr := t.steps[i]
	stoppable, done := t.cancel.bind(ctx)
	defer done()
	begun := t.e.cfg.Clock.Boot()
	for sr.GetRetryAt() != nil {
		if err := t.mayGoOn(); err != nil {
			return err
		}
		most := sr.GetRetryWait().AsDuration() - (t.e.cfg.Clock.Boot() - begun)
		left := min(sr.GetRetryAt().AsDuration()-t.spent(), most)
		if left <= 0 {
			return nil
		}
		if !clock.Sleep(stoppable, min(left, max(t.remaining(), 0), lookAgain)) && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// left is how much of its own time a step has. It does not begin anew with a
// restart or a reboot.
func (t *task) left(i int) (d time.Duration, cause error) {
	sr, planned := t.steps[i], t.plan.GetSteps()[i]
	d, cause = t.remaining(), errDeadline
	own := planned.GetTimeout().AsDuration()
	if own == 0 && repeatable(planned) {
		own = stepTimeout
	}
	if own == 0 {
		return d, cause
	}
	if own -= max(0, t.spent()-sr.GetTryBegan().AsDuration()); own < d {
		return own, errStepTimeout
	}
	return d, cause
}
