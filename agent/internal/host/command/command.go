// Package command runs commands in transient units under the shim, and finds
// them again.
//
// What happened is decided by files that the shim makes durable, never by what
// systemd remembers: a unit that has ended is collected, and its exit status
// with it. With the unit's state read first, so that a shim which ends meanwhile
// is not missed:
//
//	unit runs                     wait for its end
//	unit runs, and is not ours    the outcome is not known
//	result                        that is the outcome
//	no unit, marker, no result    the outcome is not known
//	no unit, no marker            it was never started, and may be
package command

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/agent/internal/shim"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// Systemd is what a [Runner] asks of systemd.
type Systemd interface {
	Unit(ctx context.Context, name string) (host.UnitStatus, error)
	StartTransient(ctx context.Context, name string, properties []sd.Property) error
	StopUnit(ctx context.Context, name string) error
	ResetFailed(ctx context.Context, name string)
}

// Config is what a [Runner] needs.
type Config struct {
	// StateDir holds the directories of the commands.
	StateDir string
	// Executable is the absolute path of millwrightd.
	Executable string
	Clock      clock.Clock
	Logger     *slog.Logger
	Systemd    Systemd
}

// Runner runs commands and keeps their records. It is safe for concurrent use
// with different ids.
type Runner struct{ cfg Config }

// New returns a Runner.
func New(cfg Config) *Runner { return &Runner{cfg: cfg} }

// Run does what host.Commander promises for the attempt that id names.
func (r *Runner) Run(ctx context.Context, id shim.ID, c host.Command) (host.Outcome, error) {
	dir, err := id.Dir(r.cfg.StateDir)
	if err != nil {
		return host.Outcome{}, err
	}
	one := &one{Runner: r, id: id, dir: dir, unit: id.Unit(), grace: c.StopGrace}
	out, err := one.run(ctx, c)
	if err != nil {
		return host.Outcome{}, fmt.Errorf("run command in %s: %w", one.unit, err)
	}
	return out, nil
}

// one is a call of Run.
type one struct {
	*Runner
	id   shim.ID
	dir  shim.Dir
	unit string
	// grace is what the command has between SIGTERM and SIGKILL; 0: the shim's own.
	grace time.Duration
}

func (o *one) run(ctx context.Context, c host.Command) (host.Outcome, error) {
	running, err := o.adoptable(ctx)
	if errors.Is(err, host.ErrOutcomeUnknown) {
		return host.Outcome{}, err
	}
	if err != nil {
		return o.interrupted(ctx, err)
	}
	if !running {
		out, started, err := o.recorded()
		if started {
			return out, err
		}
		if err := o.start(ctx, c); err != nil {
			return o.notStarted(ctx, err)
		}
	}
	return o.wait(ctx)
}

// adoptable reports whether a unit of an earlier call runs, to be waited for.
// While systemd does not answer, it asks again until ctx ends or the outcome is
// there without it.
func (o *one) adoptable(ctx context.Context) (bool, error) {
	for {
		u, err := o.cfg.Systemd.Unit(ctx, o.unit)
		if err == nil {
			if systemd.Running(u) && o.foreign(u) {
				return false, fmt.Errorf("%w: the unit %s runs, and this agent did not start it (invocation %s)",
					host.ErrOutcomeUnknown, o.unit, u.Invocation)
			}
			running := systemd.Running(u) && adopts(o.cfg.Logger)
			if running {
				o.cfg.Logger.Info("command found running", "unit", o.unit, "invocation_id", u.Invocation)
			}
			return running, nil
		}
		if _, e := o.dir.Result(); e == nil {
			return false, nil
		}
		if err := o.pause(ctx, err); err != nil {
			return false, err
		}
	}
}

// foreign reports whether a unit that runs under the command's name is of
// someone else: the spec is durable before the unit starts, and the marker names
// the invocation that took it.
func (o *one) foreign(u host.UnitStatus) bool {
	if _, err := o.dir.Spec(); errors.Is(err, fs.ErrNotExist) {
		return true
	}
	marker, err := o.dir.Marker()
	return err == nil && marker.GetStartError() == "" && marker.GetInvocationId() != "" && u.Invocation != "" && marker.GetInvocationId() != u.Invocation
}

// pause waits before systemd is asked again. It returns the cause of ctx when
// that ends.
func (o *one) pause(ctx context.Context, why error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	o.cfg.Logger.Warn("state of a command is not known now", "unit", o.unit, "err", why)
	if !clock.Sleep(ctx, statePauseMin) {
		return context.Cause(ctx)
	}
	return nil
}

// recorded decides by the files of a command whose unit does not run. It reports
// false when the program was never started.
func (o *one) recorded() (out host.Outcome, started bool, err error) {
	rec, err := o.dir.Result()
	if err == nil {
		if out, err = shim.Outcome(rec); err != nil {
			err = fmt.Errorf("%w: %w", host.ErrNotStarted, err)
		}
		return out, true, err
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return host.Outcome{}, true, fmt.Errorf("%w: %w", host.ErrOutcomeUnknown, err)
	}
	marker, err := o.dir.Marker()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return host.Outcome{}, false, nil
	case err != nil:
		return host.Outcome{}, true, fmt.Errorf("%w: %w", host.ErrOutcomeUnknown, err)
	}
	return host.Outcome{}, true, o.unknown(marker)
}

func (o *one) unknown(marker *agentv1.CommandRecord) error {
	why := o.dir.Death()
	if why == "" {
		why = "nothing says how it ended"
		if boot, err := shim.BootID(); err == nil && boot != marker.GetBootId() {
			why = "the machine went down while it ran"
		}
	}
	return fmt.Errorf("%w: it was started at %s in boot %s, and %s", host.ErrOutcomeUnknown,
		marker.GetStartTime().AsTime().Format(time.RFC3339), marker.GetBootId(), why)
}

// start makes the spec durable and starts the unit. That the unit is there
// already is no error: then a call that was cut off had started it.
func (o *one) start(ctx context.Context, c host.Command) error {
	spec := &taskv1.CommandStep{
		Argv: c.Argv, WorkingDirectory: c.Dir, Environment: c.Environment, User: c.User,
	}
	if c.Timeout > 0 {
		spec.Timeout = durationpb.New(c.Timeout)
	}
	if c.StopGrace > 0 {
		spec.StopGrace = durationpb.New(c.StopGrace)
	}
	if err := crash.Fault("host.command.spec.before"); err != nil {
		return err
	}
	if err := o.dir.WriteSpec(spec); err != nil {
		return err
	}
	if err := crash.Fault("host.command.spec.after"); err != nil {
		return err
	}
	o.cfg.Systemd.ResetFailed(ctx, o.unit)
	if err := crash.Fault("host.command.start.before"); err != nil {
		return err
	}
	err := o.cfg.Systemd.StartTransient(ctx, o.unit, o.properties(c.StopGrace))
	if errors.Is(err, systemd.ErrUnitExists) {
		err = nil
	}
	if err != nil {
		return err
	}
	return crash.Fault("host.command.start.after")
}

// properties are those of the transient unit.
func (o *one) properties(grace time.Duration) []sd.Property {
	argv := []string{o.cfg.Executable, "shim", string(o.dir)}
	post := []string{o.cfg.Executable, "shim", "--post", string(o.dir)}
	p := []sd.Property{
		sd.PropDescription(fmt.Sprintf("Millwright task %s, step %d", o.id.TaskID, o.id.Step)),
		sd.PropSlice("millwright.slice"),
		sd.PropType("exec"),
		sd.PropExecStart(argv, false),
		execProperty("ExecStopPost", post),
		property("CollectMode", "inactive-or-failed"),
		property("KillMode", "control-group"),
		property("TimeoutStopUSec", uint64(shim.StopTimeout(grace).Microseconds())),
		// A command that the kernel kills for want of memory is an outcome, which
		// the shim must live to record.
		property("OOMPolicy", "continue"),
		property("MemoryAccounting", true),
		property("StandardInput", "null"),
		property("LimitCORE", uint64(0)),
	}
	if env := crashEnvironment(); len(env) > 0 {
		p = append(p, property("Environment", env))
	}
	return p
}

// wait waits until the unit has ended, and tells what the files say then.
func (o *one) wait(ctx context.Context) (host.Outcome, error) {
	if err := o.untilEnded(ctx); err != nil {
		return o.interrupted(ctx, err)
	}
	out, started, err := o.recorded()
	if !started {
		return o.notStarted(ctx, errors.New("the shim ended before it started the program: "+o.death()))
	}
	return out, err
}

// interrupted answers when ctx has ended: with a wish to stop the command, or
// without.
func (o *one) interrupted(ctx context.Context, err error) (host.Outcome, error) {
	if errors.Is(context.Cause(ctx), host.ErrStop) {
		return o.stop(ctx)
	}
	return host.Outcome{}, err
}

func (o *one) death() string {
	where := "see journalctl -u " + o.unit
	if d := o.dir.Death(); d != "" {
		return d + "; " + where
	}
	return where
}

const (
	// statePause is how often the unit's state is asked for while there is no
	// result; it grows from the first to the second.
	statePauseMin, statePauseMax = time.Second, 5 * time.Second
	// filePause is how often the result is looked for.
	filePauseMin, filePauseMax = 5 * time.Millisecond, 250 * time.Millisecond
)

// untilEnded waits until no process of the unit is left. The result shows it at
// once; the state of the unit shows it too when there never is a result.
func (o *one) untilEnded(ctx context.Context) error {
	filePause, statePause := filePauseMin, statePauseMin
	asked := o.cfg.Clock.Boot()
	for {
		if !clock.Sleep(ctx, filePause) {
			return context.Cause(ctx)
		}
		filePause = min(2*filePause, filePauseMax)
		now := o.cfg.Clock.Boot()
		_, err := o.dir.Result()
		if errors.Is(err, fs.ErrNotExist) && now-asked < statePause {
			continue
		}
		if err != nil {
			statePause = min(2*statePause, statePauseMax)
		}
		asked = now
		u, err := o.cfg.Systemd.Unit(ctx, o.unit)
		if err == nil && !systemd.Running(u) {
			return nil
		}
		if err != nil {
			if err := o.pause(ctx, err); err != nil {
				return err
			}
		}
	}
}

// stopSlack bounds the stop of a command, beyond the time that systemd gives it.
const stopSlack = 30 * time.Second

// stopTries is how often a stop is tried.
const stopTries = 3

// stop stops the unit and tells the outcome. A program that was not started yet
// never will be.
func (o *one) stop(ctx context.Context) (host.Outcome, error) {
	why := context.Cause(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shim.StopTimeout(o.grace)+stopSlack)
	defer cancel()
	o.cfg.Logger.Info("command is stopped", "unit", o.unit)
	crash.Point("host.command.stop.before")
	stopErr := o.stopUnit(ctx)
	crash.Point("host.command.stop.after")
	out, started, err := o.recorded()
	if !started {
		return o.burn(ctx, why)
	}
	if err != nil && stopErr != nil {
		err = fmt.Errorf("%w; and it could not be stopped: %w", err, stopErr)
	}
	return out, err
}

// stopUnit stops the unit, and tries again: a task whose command runs on must not
// end because systemd could not be reached once.
func (o *one) stopUnit(ctx context.Context) error {
	for try := 1; ; try++ {
		err := o.cfg.Systemd.StopUnit(ctx, o.unit)
		if err == nil || try == stopTries || !clock.Sleep(ctx, statePauseMin) {
			return err
		}
		o.cfg.Logger.Warn("command is not stopped yet", "unit", o.unit, "err", err)
	}
}

// notStarted answers after a start that failed. When ctx ended without a wish to
// stop the command, it may be started by another call; otherwise it never will
// be, so that the answer stays true.
func (o *one) notStarted(ctx context.Context, why error) (host.Outcome, error) {
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, host.ErrStop):
		return o.stop(ctx)
	case cause != nil:
		return host.Outcome{}, cause
	}
	return o.burn(ctx, why)
}

// burn makes the answer that the program was not started final. Should a shim
// have started it meanwhile, then that is waited for.
func (o *one) burn(ctx context.Context, why error) (host.Outcome, error) {
	boot, err := shim.BootID()
	if err != nil {
		return host.Outcome{}, errors.Join(why, err)
	}
	crash.Point("host.command.burn.before")
	err = o.dir.Burn(&agentv1.CommandRecord{
		TaskId: o.id.TaskID, Step: o.id.Step, Attempt: o.id.Attempt,
		BootId: boot, StartTime: timestamppb.New(o.cfg.Clock.Now()),
	}, why)
	if errors.Is(err, fs.ErrExist) {
		return o.wait(ctx)
	}
	if err != nil {
		return host.Outcome{}, errors.Join(why, err)
	}
	crash.Point("host.command.burn.after")
	return host.Outcome{}, fmt.Errorf("%w: %w", host.ErrNotStarted, why)
}
