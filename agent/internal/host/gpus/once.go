package gpus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

// Once runs the one command of a step, whatever crashes; see host.Commander.
type Once interface {
	// Unit is the name of the unit in which it runs.
	Unit() string
	// Run is host.Commander's RunCommand.
	Run(ctx context.Context, c host.Command) (host.Outcome, error)
	// Said is the beginning of what the command wrote, to its two streams.
	Said() (string, error)
}

const (
	// stopGrace is between the two signals with which nvidia-smi is stopped.
	stopGrace = 10 * time.Second
	// beyond is how much longer than nvidia-smi may take its end is waited for.
	beyond = time.Minute
)

// ResetOnce does what host.GPUResetter promises, with the command of a step. That
// the agent ends does not end nvidia-smi: the next life waits for it before it asks
// the driver anything.
func (s *Set) ResetOnce(ctx context.Context, once Once, uuids []string, timeout time.Duration) (host.GPUReset, error) {
	r, err := s.resetOnce(ctx, once, uuids, timeout)
	if err != nil {
		err = fmt.Errorf("reset GPU %s: %w", strings.Join(uuids, ", "), err)
	}
	return r, err
}

func (s *Set) resetOnce(ctx context.Context, once Once, uuids []string, timeout time.Duration) (host.GPUReset, error) {
	uncut, done := untilEnd(ctx, timeout)
	defer done()
	release, err := s.take(uncut) // one that runs already is waited for here
	if err != nil {
		return host.GPUReset{}, err
	}
	defer release()
	program, err := s.cfg.Find(uncut, "nvidia-smi")
	if err != nil {
		return host.GPUReset{}, fmt.Errorf("%w: %w", host.ErrNotStarted, err)
	}
	if err := s.hush(uncut); err != nil {
		return host.GPUReset{}, err
	}
	defer s.quiet.over(linger)
	if err := s.cfg.Changes.Mark(once.Unit()); err != nil {
		return host.GPUReset{}, err
	}
	run := uncut
	if errors.Is(context.Cause(ctx), host.ErrStop) {
		run = ctx // it is not started any more; how it ended is still told
	}
	crash.Point("host.gpu.reset.before")
	out, err := once.Run(run, host.Command{
		Argv: []string{program, "--gpu-reset", "-i", strings.Join(uuids, ",")}, Environment: s.cfg.Environment, Timeout: timeout, StopGrace: stopGrace,
	})
	crash.Point("host.gpu.reset.after")
	if err != nil {
		return host.GPUReset{}, err
	}
	if err := s.cfg.Changes.Mark(""); err != nil {
		return host.GPUReset{}, err
	}
	return judged(ctx, once, out)
}

// judged says what a run of nvidia-smi that has ended means.
func judged(ctx context.Context, once Once, out host.Outcome) (host.GPUReset, error) {
	said, err := once.Said()
	if err != nil {
		return host.GPUReset{}, err
	}
	said = strings.Join(strings.Fields(strings.ToValidUTF8(said, "?")), " ")
	const most = 1000
	r := host.GPUReset{Outcome: out, Said: said[:min(len(said), most)], Some: strings.Contains(said, "successfully reset")}
	r.Said = strings.ToValidUTF8(r.Said, "")
	switch {
	case out.TimedOut:
		return r, fmt.Errorf("nvidia-smi did not end in time and was stopped, so that what it did is not known; it said %q: %w", r.Said, host.ErrGPUUnresponsive)
	case out.Signal != 0:
		return r, fmt.Errorf("nvidia-smi was ended by signal %d, so that what it did is not known; it said %q: %w", out.Signal, r.Said, host.ErrGPUUnresponsive)
	case out.ExitCode != 0:
		return r, refused(ctx, said, fmt.Errorf("nvidia-smi exited with code %d", out.ExitCode))
	}
	return r, nil
}

// untilEnd returns a context that ends with ctx, but for a wish to stop, which does
// not cut a reset off. The shim keeps its time; should that fail too, nothing is
// known of the reset.
func untilEnd(ctx context.Context, timeout time.Duration) (context.Context, func()) {
	out, end := context.WithCancelCause(context.WithoutCancel(ctx))
	timer := time.AfterFunc(timeout+stopGrace+beyond, func() {
		end(fmt.Errorf("%w: it does not end although it was stopped", host.ErrOutcomeUnknown))
	})
	unbind := context.AfterFunc(ctx, func() {
		if cause := context.Cause(ctx); !errors.Is(cause, host.ErrStop) {
			end(cause)
		}
	})
	return out, func() { timer.Stop(); unbind(); end(context.Canceled) }
}
