package executor

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpuaas/millwright/agent/internal/crash"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// apply applies a step. When it is not fresh it may have been applied before a
// crash, and its effect class says what that allows.
func (t *task) apply(ctx context.Context, i int, step tasks.Step, fresh bool) error {
	sr, planned := t.steps[i], t.plan.GetSteps()[i]
	if !fresh {
		if done, err := t.applied(ctx, i, step); done || err != nil {
			return err
		}
	}
	if planned.GetEffect() != taskv1.Effect_EFFECT_AT_MOST_ONCE {
		if err := t.mayGoOn(); err != nil {
			return err
		}
		if !fresh {
			sr.Attempts++
			sr.BootId = t.e.cfg.BootID
			if err := t.putStep(i); err != nil {
				return err
			}
			crash.Point("executor.step.again")
		}
	}
	crash.Point("executor.step.apply")
	limited, done := t.limit(ctx, planned)
	defer done()
	var out []byte
	err := t.guard(func() (err error) {
		out, err = step.Apply(limited, t.e.cfg.Hosts.ForStep(t.id, uint32(i)))
		return err
	})
	crash.Point("executor.step.changed")
	t.note(i, step, out, err)
	if err != nil {
		return t.applyError(ctx, limited, i, err)
	}
	sr.Phase, sr.BootId = taskv1.StepPhase_STEP_PHASE_APPLIED, t.e.cfg.BootID
	if err := t.putStep(i); err != nil {
		return err
	}
	crash.Point("executor.step.applied")
	return nil
}

// applied decides about a step that may have been applied before a crash.
func (t *task) applied(ctx context.Context, i int, step tasks.Step) (bool, error) {
	sr, effect := t.steps[i], t.plan.GetSteps()[i].GetEffect()
	switch {
	case effect == taskv1.Effect_EFFECT_CHECK_THEN_ACT:
	case effect == taskv1.Effect_EFFECT_REBOOT && sr.GetBootId() != t.e.cfg.BootID:
	default:
		return false, nil
	}
	err := t.retry(ctx, verifyTries, func() error { return step.Verify(ctx, t.e.cfg.Hosts.Prober()) })
	switch {
	case errors.Is(err, tasks.ErrNotSatisfied):
		return false, nil
	case err != nil:
		return false, t.stepError(ctx, i, err)
	}
	sr.Phase, sr.BootId = taskv1.StepPhase_STEP_PHASE_APPLIED, t.e.cfg.BootID
	return true, t.putStep(i)
}

// limit gives a step its time. Its end stops a command, and so does a cancel;
// other steps are not cut off by a cancel, which waits for their end.
func (t *task) limit(ctx context.Context, planned *taskv1.PlannedStep) (context.Context, func()) {
	once := planned.GetEffect() == taskv1.Effect_EFFECT_AT_MOST_ONCE
	d, cause := t.remaining(), errDeadline
	if own := planned.GetTimeout().AsDuration(); own > 0 && own < d {
		d, cause = own, errStepTimeout
	} else if own == 0 && !once && stepTimeout < d {
		d, cause = stepTimeout, errStepTimeout
	}
	unbind := func() {}
	if once {
		ctx, unbind = t.cancel.bind(ctx)
	}
	ctx, done := context.WithTimeoutCause(ctx, d, cause)
	return ctx, func() { done(); unbind() }
}

var (
	errDeadline    = fmt.Errorf("%w: the task's time is over", host.ErrStop)
	errStepTimeout = fmt.Errorf("%w: the step's time is over", host.ErrStop)
)

// note keeps what a step returned, also beside an error.
func (t *task) note(i int, step tasks.Step, out []byte, err error) {
	sr := t.steps[i]
	if out != nil {
		sr.Out = out
	}
	var reason *tasks.ReasonError
	if errors.As(err, &reason) && reason.Command != nil {
		sr.Command = reason.Command
		return
	}
	if c, ok := step.(tasks.CommandStep); ok && out != nil {
		command, err := c.Outcome(out)
		if err != nil {
			t.log.Error("outcome of a command cannot be read", "step", i, "err", err)
			return
		}
		sr.Command = command
	}
}

// applyError says what an error of Apply means. limited is the context that the
// step had.
func (t *task) applyError(ctx, limited context.Context, i int, err error) error {
	planned := t.plan.GetSteps()[i]
	fails := func(reason, why string) error {
		return &failure{reason: reason, message: why + stepMessage(i, planned, err), step: i}
	}
	var known *tasks.ReasonError
	isKnown := errors.As(err, &known)
	if isKnown && known.Unchanged {
		t.steps[i].Phase = taskv1.StepPhase_STEP_PHASE_UNSPECIFIED // nothing to undo
	}
	stopped := error(nil)
	if limited.Err() != nil && ctx.Err() == nil {
		stopped = context.Cause(limited)
	}
	// A command that had ended by itself before it was found again is not one
	// that was stopped, or kept from its start.
	byItself := isKnown && known.Reason != tasks.ReasonCommandSignal && !errors.Is(err, host.ErrStop)
	switch {
	case errors.Is(err, host.ErrOutcomeUnknown):
		return &unknown{i, err}
	case isKnown && t.cancel.isOn(), errors.Is(stopped, errCancelled):
		return fails(reasonCancelled, "")
	case errors.Is(stopped, errDeadline) && !byItself:
		return fails(reasonDeadline, fmt.Sprintf("it may run for %v, and that was over in ", t.deadline()))
	case errors.Is(stopped, errStepTimeout) && !byItself:
		return fails(reasonStepTimeout, "its time was over: ")
	}
	return t.stepError(ctx, i, err)
}

// stepError says what any other error of a step means.
func (t *task) stepError(ctx context.Context, i int, err error) error {
	if ctx.Err() != nil {
		return ctx.Err() // interrupted, not failed: it goes on later
	}
	f := &failure{reason: reasonStepFailed, message: stepMessage(i, t.plan.GetSteps()[i], err), step: i}
	var reason *tasks.ReasonError
	if errors.As(err, &reason) {
		f.reason = reason.Reason
	}
	return f
}
