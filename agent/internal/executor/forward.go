package executor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// The codes of tasks that fail or are held after a step began.
const (
	reasonStepFailed     = "STEP_FAILED"
	reasonStepTimeout    = "STEP_TIMEOUT"
	reasonDeadline       = "DEADLINE_EXCEEDED"
	reasonVerifyFailed   = "VERIFY_FAILED"
	reasonResultFailed   = "RESULT_FAILED"
	reasonOutcomeUnknown = "OUTCOME_UNKNOWN"
	reasonUndoFailed     = "UNDO_FAILED"
	reasonHostHangs      = "HOST_HANGS"
)

const (
	// stepTimeout is for one attempt of a step that says nothing itself. A
	// command without a limit has only the task's deadline.
	stepTimeout = 5 * time.Minute
	// lastCheck is what the final check gets at least, however late it is: the
	// steps are done, and only it can tell.
	lastCheck   = time.Minute
	verifyTries = 5
)

// failure turns a task to undo.
type failure struct {
	reason, message string
	step            int // the step that failed, or -1
}

func (f *failure) Error() string { return f.message }

// stepMessage numbers steps from 0, as the plan and the history do.
func stepMessage(i int, p *taskv1.PlannedStep, err error) string {
	return fmt.Sprintf("step %d (%s): %v", i, p.GetTitle(), err)
}

// forward brings every step to verified, then the whole.
func (t *task) forward(ctx context.Context) error {
	result, err := t.toTheEnd(ctx)
	var f *failure
	switch {
	case err == nil:
		return t.finish(ctx, end{state: succeeded, result: result})
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &f):
		if err := t.turn(ctx, f); err != nil {
			return err
		}
		return t.backward(ctx)
	case errors.Is(err, host.ErrOutcomeUnknown), errors.Is(err, errHangs):
		return t.holdUnknown(ctx, err)
	default:
		return err
	}
}

func (t *task) toTheEnd(ctx context.Context) (*anypb.Any, error) {
	for i := range t.steps {
		if i == t.ownEnd() {
			if err := t.checkOwn(ctx, i); err != nil {
				return nil, err
			}
		}
		if err := t.step(ctx, i); err != nil {
			return nil, err
		}
	}
	return t.conclude(ctx)
}

// unknown is a step whose outcome cannot be known.
type unknown struct {
	step int
	err  error
}

func (u *unknown) Error() string { return u.err.Error() }
func (u *unknown) Unwrap() error { return u.err }

// step brings one step to verified. Each phase is durable before the next
// begins.
func (t *task) step(ctx context.Context, i int) error {
	sr, planned := t.steps[i], t.plan.GetSteps()[i]
	step, err := t.e.cfg.Registry.Open(planned)
	if err != nil {
		return &failure{reason: reasonStepFailed, message: stepMessage(i, planned, err), step: i}
	}
	if err := t.rebooted(ctx, i, step); err != nil {
		return err
	}
	fresh := false
	for sr.GetPhase() != taskv1.StepPhase_STEP_PHASE_VERIFIED {
		var err error
		switch sr.GetPhase() {
		case taskv1.StepPhase_STEP_PHASE_UNSPECIFIED:
			err, fresh = t.observe(ctx, i, step), true
		case taskv1.StepPhase_STEP_PHASE_OBSERVED:
			err, fresh = t.apply(ctx, i, step, fresh), false
		case taskv1.StepPhase_STEP_PHASE_APPLIED:
			err = t.verify(ctx, i, step)
		default:
			err = fmt.Errorf("step %d of task %s is %v while it goes forward: %w", i, t.id, sr.GetPhase(), state.ErrInvariant)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// mayGoOn is asked before a step changes anything.
func (t *task) mayGoOn() error {
	switch {
	case t.cancel.isOn():
		return &failure{reason: reasonCancelled, step: -1}
	case t.remaining() <= 0:
		return &failure{reason: reasonDeadline, message: fmt.Sprintf("it may run for %v, and that is over", t.deadline()), step: -1}
	}
	return nil
}

func (t *task) observe(ctx context.Context, i int, step tasks.Step) error {
	if err := t.mayGoOn(); err != nil {
		return err
	}
	sr := t.steps[i]
	start := t.e.now()
	limited, done := t.reading(ctx)
	defer done()
	before, err := retry(limited, t, verifyTries, func() ([]byte, error) {
		return step.Observe(limited, t.e.cfg.Hosts.Prober())
	})
	if err != nil {
		return t.readError(ctx, limited, i, err)
	}
	sr.Phase, sr.Before, sr.Attempts = taskv1.StepPhase_STEP_PHASE_OBSERVED, before, 1
	sr.BootId, sr.StartTime, sr.TryBegan = t.e.cfg.BootID, start, durationpb.New(t.spent())
	if d := t.plan.GetSteps()[i].GetStartDelay().AsDuration(); d > 0 {
		t.wait(i, d)
	}
	_, command := step.(tasks.CommandStep)
	err = t.e.update(func(tx *state.Tx) error {
		if command {
			tx.PutOutput(state.Output{TaskID: t.id, Step: uint32(i)})
		}
		return tx.PutStep(t.id, uint32(i), sr)
	})
	if err == nil {
		crash.Point("executor.step.observed")
	}
	return err
}

func (t *task) verify(ctx context.Context, i int, step tasks.Step) error {
	sr := t.steps[i]
	limited, done := t.reading(ctx)
	defer done()
	if err := t.verifies(limited, step); err != nil {
		return t.readError(ctx, limited, i, err)
	}
	sr.Phase, sr.EndTime, sr.BootId = taskv1.StepPhase_STEP_PHASE_VERIFIED, t.e.now(), t.e.cfg.BootID
	last := i == len(t.steps)-1
	err := t.e.update(func(tx *state.Tx) error {
		if err := tx.PutStep(t.id, uint32(i), sr); err != nil || last {
			return err // the last event tells of the last step
		}
		rec, err := tx.Task(t.id)
		if err != nil || rec.GetEvents() >= maxWithSteps {
			return err
		}
		err = t.emitOptional(tx, rec, &taskv1.Event{Payload: &taskv1.Event_StepEnded{StepEnded: &taskv1.StepEnded{
			TaskId: t.id, Step: uint32(i), Outcome: outcome(sr),
		}}})
		if err != nil {
			return err
		}
		return tx.PutTask(rec)
	})
	if err == nil {
		crash.Point("executor.step.verified")
	}
	return err
}

func (t *task) putStep(i int) error {
	return t.e.update(func(tx *state.Tx) error { return tx.PutStep(t.id, uint32(i), t.steps[i]) })
}

func (t *task) deadline() time.Duration {
	if d := t.leaf.GetDeadline().AsDuration(); d > 0 {
		return d
	}
	d := t.kind.Deadline(t.spec)
	for _, s := range t.plan.GetSteps() {
		d += s.GetWaitMost().AsDuration() // others' time
	}
	return d
}

// remaining is how much of its time the task has left, by CLOCK_BOOTTIME.
func (t *task) remaining() time.Duration {
	return t.deadline() - t.spent()
}

// conclude verifies the whole. From its beginning on it is too late to cancel.
func (t *task) conclude(ctx context.Context) (*anypb.Any, error) {
	if !t.rec.GetFinalVerifyBegun() {
		err := t.commit(func(_ *state.Tx, rec *agentv1.TaskRecord) error {
			if rec.GetCancelRequested() {
				return errStale
			}
			rec.FinalVerifyBegun = true
			return nil
		})
		if errors.Is(err, errStale) {
			return nil, &failure{reason: reasonCancelled, step: -1}
		}
		if err != nil {
			return nil, err
		}
		crash.Point("executor.verify.begun")
	}
	limited, done := context.WithTimeout(ctx, max(t.remaining(), lastCheck))
	defer done()
	err := t.check(limited, func() error { return t.kind.Verify(limited, t.e.cfg.Hosts.Prober(), t.spec) })
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, &failure{reason: reasonVerifyFailed, message: "after all steps the node is not as it should be: " + err.Error(), step: -1}
	}
	result, err := t.result(limited)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, &failure{reason: reasonResultFailed, message: "the result cannot be read: " + err.Error(), step: -1}
	}
	return result, nil
}

func (t *task) result(ctx context.Context) (*anypb.Any, error) {
	outs := make([][]byte, len(t.steps))
	for i, sr := range t.steps {
		outs[i] = sr.GetOut()
	}
	outs = tasks.OwnOuts(t.plan, outs)
	return retry(ctx, t, verifyTries, func() (*anypb.Any, error) {
		return t.kind.Result(ctx, t.e.cfg.Hosts.Prober(), t.spec, outs)
	})
}
