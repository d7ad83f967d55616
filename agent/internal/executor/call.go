package executor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuaas/millwright/agent/internal/clock"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

const (
	// hangGrace is what code of a task has to return once its time is over. After
	// it the call is given up: it may sit in the kernel for ever.
	hangGrace = 30 * time.Second
	// stopGrace is the same for a command, which is given its own time to stop.
	stopGrace = 15 * time.Minute
)

// errHangs is wrapped by the error of a call that did not return when its time
// was over. What it was to do may still happen.
var errHangs = errors.New("the call does not return although its time is over")

// call runs fn, which is code of a task, and turns a panic into an error. When
// ctx has ended and fn has not returned after grace, the call is given up: the
// error wraps errHangs and fn goes on alone, until it returns or the agent ends.
func call[T any](ctx context.Context, t *task, grace time.Duration, fn func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	done := make(chan answer, 1)
	left := t.e.called(t.id)
	t.e.calls.Go(func() {
		var a answer
		a.err = t.guard(func() (err error) {
			a.value, err = fn()
			return err
		})
		left() // before the answer: who acts on it must not find the call still going on
		done <- a
	})
	select {
	case a := <-done:
		return a.value, a.err
	case <-ctx.Done():
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case a := <-done:
		return a.value, a.err
	case <-timer.C:
	}
	t.log.Error("a call to the node hangs and is given up", "after", grace, "why", context.Cause(ctx))
	var zero T
	return zero, fmt.Errorf("%w: %w", errHangs, context.Cause(ctx))
}

// called counts a call of a task, until the function it returns is called.
func (e *Executor) called(id string) func() {
	add := func(n int) {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.inCall[id] += n; e.inCall[id] == 0 {
			delete(e.inCall, id)
		}
	}
	add(1)
	return func() { add(-1) }
}

// hangs reports whether a call of the task was given up and goes on.
func (e *Executor) hangs(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.inCall[id] > 0
}

// retry calls fn until it succeeds or says something about the node rather than
// about reaching it, at most tries times.
func retry[T any](ctx context.Context, t *task, tries int, fn func() (T, error)) (T, error) {
	for pause, i := 10*time.Millisecond, 1; ; pause, i = min(4*pause, 10*time.Second), i+1 {
		out, err := call(ctx, t, hangGrace, fn)
		if err == nil || i >= tries || ctx.Err() != nil || final(err) {
			return out, err
		}
		t.log.WarnContext(ctx, "trying again", "err", err, "again_in", pause)
		if !clock.Sleep(ctx, pause) {
			return out, err
		}
	}
}

// final reports whether an error of a read would only come again.
func final(err error) bool {
	var reason *tasks.ReasonError
	var panicked *panicked
	return errors.Is(err, tasks.ErrNotSatisfied) || errors.Is(err, tasks.ErrPrecondition) || errors.Is(err, errHangs) ||
		errors.Is(err, tasks.ErrIrreversible) || errors.As(err, &reason) || errors.As(err, &panicked)
}

// check is retry of what only answers yes or no.
func (t *task) check(ctx context.Context, fn func() error) error {
	_, err := retry(ctx, t, verifyTries, func() (struct{}, error) { return struct{}{}, fn() })
	return err
}

// verifies asks a step whether its change is in place.
func (t *task) verifies(ctx context.Context, step tasks.Step) error {
	return t.check(ctx, func() error { return step.Verify(ctx, t.e.cfg.Hosts.Prober()) })
}

// reading gives a part of a task that only reads its time: what is left to the
// task, a last check at least, and never more than a step's time.
func (t *task) reading(ctx context.Context) (context.Context, func()) {
	d, cause := max(t.remaining(), lastCheck), errDeadline
	if d > stepTimeout {
		d, cause = stepTimeout, errStepTimeout
	}
	return context.WithTimeoutCause(ctx, d, cause)
}

// graceOf is how long a step's Apply may go on when its time is over.
func graceOf(p *taskv1.PlannedStep) time.Duration {
	if p.GetEffect() == taskv1.Effect_EFFECT_AT_MOST_ONCE {
		return stopGrace
	}
	return hangGrace
}
