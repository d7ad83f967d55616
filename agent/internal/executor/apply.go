package executor

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/state"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// apply applies a step. When it is not fresh it may have been applied before a
// crash or by a try that failed, and its effect class says what that allows.
func (t *task) apply(ctx context.Context, i int, step tasks.Step, fresh bool) error {
	sr, planned := t.steps[i], t.plan.GetSteps()[i]
	waited := sr.GetRetryAt() != nil
	if err := t.await(ctx, i); err != nil {
		return err
	}
	// What waits before its first attempt was not begun.
	fresh = fresh || waited && sr.GetFailures() == 0
	if !fresh {
		if done, err := t.applied(ctx, i, step); done || err != nil {
			return err
		}
	}
	if err := t.ready(i, fresh); err != nil {
		return err
	}
	if err := t.begun(i, fresh, waited); err != nil {
		return err
	}
	t.tellFirst(ctx, planned)
	crash.Point("executor.step.apply")
	limited, done := t.limit(ctx, i)
	defer done()
	out, err := call(limited, t, graceOf(planned), func() ([]byte, error) {
		return step.Apply(limited, t.e.cfg.Hosts.ForStep(t.id, uint32(i)))
	})
	crash.Point("executor.step.changed")
	t.note(i, step, out, err)
	if err != nil {
		if again, e := t.again(ctx, i, err); again {
			return e
		}
		return t.applyError(ctx, limited, i, err)
	}
	sr.Phase, sr.BootId, sr.Error = taskv1.StepPhase_STEP_PHASE_APPLIED, t.e.cfg.BootID, ""
	if err := t.putStep(i); err != nil {
		return err
	}
	crash.Point("executor.step.applied")
	return nil
}

// ready is asked right before a step is applied. A command is asked for in any
// case, since it may be running: the host stops it, or does not start it.
func (t *task) ready(i int, fresh bool) error {
	planned := t.plan.GetSteps()[i]
	if planned.GetEffect() == taskv1.Effect_EFFECT_AT_MOST_ONCE {
		return nil
	}
	left, cause := t.left(i)
	if planned.GetEffect() == taskv1.Effect_EFFECT_REBOOT && !fresh {
		if left > 0 {
			return nil // it was asked for, and is waited for
		}
		return &unknown{i, fmt.Errorf("%w: the node was to reboot, and is still up", host.ErrOutcomeUnknown)}
	}
	if err := t.mayGoOn(); err != nil {
		return err
	}
	if left <= 0 {
		return &failure{reason: reasonStepTimeout, step: i, message: stepMessage(i, planned, cause)}
	}
	return nil
}

// begun makes durable that a try begins, unless Observe has just done so.
func (t *task) begun(i int, fresh, waited bool) error {
	sr, reboots := t.steps[i], t.plan.GetSteps()[i].GetEffect() == taskv1.Effect_EFFECT_REBOOT
	once := t.plan.GetSteps()[i].GetEffect() == taskv1.Effect_EFFECT_AT_MOST_ONCE
	if once || fresh && !waited && !reboots {
		return nil
	}
	if !fresh {
		sr.Attempts++
	}
	if waited {
		sr.TryBegan, sr.RetryAt, sr.RetryWait = durationpb.New(t.spent()), nil, nil
	}
	sr.BootId = t.e.cfg.BootID
	err := t.e.update(func(tx *state.Tx) error {
		if reboots {
			if err := t.countReboot(tx); err != nil {
				return err
			}
		}
		return tx.PutStep(t.id, uint32(i), sr)
	})
	if err == nil && !fresh {
		crash.Point("executor.step.again")
	}
	return err
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
	limited, unlimit := t.reading(ctx)
	defer unlimit()
	err := t.verifies(limited, step)
	switch {
	case errors.Is(err, tasks.ErrNotSatisfied):
		return false, nil
	case err != nil:
		return false, t.readError(ctx, limited, i, err)
	}
	if p, ok := step.(tasks.Prover); ok {
		sr.Out, err = retry(limited, t, verifyTries, func() ([]byte, error) { return p.Proof(limited, t.e.cfg.Hosts.Prober()) })
		if err != nil {
			return false, t.readError(ctx, limited, i, err)
		}
	}
	sr.Phase, sr.BootId = taskv1.StepPhase_STEP_PHASE_APPLIED, t.e.cfg.BootID
	return true, t.putStep(i)
}

// limit gives a step its time. Its end stops a command, and so does a cancel;
// other steps are not cut off by a cancel, which waits for their end.
func (t *task) limit(ctx context.Context, i int) (context.Context, func()) {
	d, cause := t.left(i)
	unbind := func() {}
	if t.plan.GetSteps()[i].GetEffect() == taskv1.Effect_EFFECT_AT_MOST_ONCE {
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
	if errors.Is(err, host.ErrOutcomeUnknown) {
		return
	}
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
	if tasks.IsWait(err) {
		err = fmt.Errorf("%s%w", waitedFor(planned, t.steps[i]), err)
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
	case errors.Is(err, host.ErrOutcomeUnknown), errors.Is(err, errHangs) && ctx.Err() == nil:
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

// readError says what an error of a step's Observe or Verify means. limited is
// the context that it had. One that hangs has changed nothing.
func (t *task) readError(ctx, limited context.Context, i int, err error) error {
	cause := context.Cause(limited)
	if ctx.Err() != nil || limited.Err() == nil || errors.Is(err, tasks.ErrNotSatisfied) {
		return t.stepError(ctx, i, err)
	}
	f := &failure{reason: reasonStepTimeout, message: stepMessage(i, t.plan.GetSteps()[i], err), step: i}
	if errors.Is(cause, errDeadline) {
		f.reason = reasonDeadline
	}
	return f
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
