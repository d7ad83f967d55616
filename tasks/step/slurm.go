package step

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// The units and files of Slurm and munge, as distributions have them.
const (
	SlurmdUnit = "slurmd.service"
	MungeUnit  = "munge.service"
	MungeKey   = "/etc/munge/munge.key"
)

const (
	// registerTime is how long a node may take to register. Slurm's daemon gives
	// up on its configuration after 9 s and on a missing device after 19 s.
	registerTime = time.Minute
	// settleTime is how long a controller may take to see what was done.
	settleTime = 20 * time.Second
	slurmPause = 250 * time.Millisecond
	slurmTime  = 5 * time.Minute
	// maxSkew is how far clocks may be apart: a credential lives 300 s.
	maxSkew = 4 * time.Minute
)

// pause waits, and reports whether ctx is still good.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// waitFor calls done until it says so, or fails, or a time is over. It returns
// whether it said so.
func waitFor(ctx context.Context, limit time.Duration, done func() (bool, error)) (bool, error) {
	over := time.NewTimer(limit)
	defer over.Stop()
	for {
		ok, err := done()
		if ok || err != nil {
			return ok, err
		}
		select {
		case <-over.C: // what was asked may take long itself
			return false, nil
		default:
		}
		if !pause(ctx, slurmPause) {
			return false, context.Cause(ctx)
		}
	}
}

func reasonError(reason, format string, args ...any) error {
	return &tasks.ReasonError{Reason: reason, Err: fmt.Errorf(format, args...)}
}

func slurmRef(node string, controllers []string) host.SlurmRef {
	return host.SlurmRef{Node: node, Servers: controllers}
}

type munge struct{ args *slurmv1.MungeStep }

// Munge returns the step that has munged run with the key that is on disk. One
// stands before the step that writes the key, for its undo, and one after it.
func Munge(args *slurmv1.MungeStep) tasks.Step { return munge{args} }

func (s munge) Args() proto.Message { return s.args }

func (s munge) Title() string {
	if s.before() {
		return "have munged read the key that was, if this is undone"
	}
	return "have munged read its key, at each boot too"
}

func (s munge) before() bool { return s.args.GetPhase() == slurmv1.MungePhase_MUNGE_PHASE_BEFORE }

func (s munge) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	st, err := h.Unit(ctx, MungeUnit)
	if err != nil {
		return nil, err
	}
	return encode(&slurmv1.SlurmdObserved{Active: active(st), Enabled: enabled(st)})
}

// Apply restarts munged: it reads its key only when it starts.
func (s munge) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	if s.before() {
		return nil, nil
	}
	if err := h.SetUnitEnabled(ctx, MungeUnit, true); err != nil {
		return nil, err
	}
	if s.args.GetRestart() {
		if err := h.StopUnit(ctx, MungeUnit); err != nil {
			return nil, err
		}
	}
	if err := h.StartUnit(ctx, MungeUnit); err != nil {
		return nil, mungeDown(ctx, h, err)
	}
	return nil, CheckMunge(ctx, h)
}

// mungeDown says why munged does not run.
func mungeDown(ctx context.Context, h host.Reader, err error) error {
	if info, statErr := h.Lstat(ctx, MungeKey); statErr == nil && info.Mode.Perm()&0o077 != 0 {
		return reasonError(tasks.ReasonMungeKeyMode, "munged does not take its key: %s has the mode %#o, and must be readable by its owner alone (chmod 0400): %w", MungeKey, info.Mode.Perm(), err)
	}
	return reasonError(tasks.ReasonMungeDown, "munged does not run, and without it Slurm trusts nobody: %w", err)
}

// CheckMunge returns nil when munged makes and reads a credential, by the same
// clock as the machine's. Otherwise the error says in plain words what is wrong.
func CheckMunge(ctx context.Context, h host.Prober) error {
	st, err := h.Unit(ctx, MungeUnit)
	if err != nil {
		return err
	}
	if st.Active != "active" {
		return mungeDown(ctx, h, fmt.Errorf("unit %s is %s: %w", MungeUnit, describe(st), tasks.ErrNotSatisfied))
	}
	p, err := h.ProbeMunge(ctx)
	switch {
	case err != nil:
		return reasonError(tasks.ReasonMungeDown, "munged runs and makes no credential: %w", err)
	case p.Skew.Abs() > maxSkew:
		return reasonError(tasks.ReasonClockOff, "munged's clock is %v off the machine's (%s): the controller refuses its credentials as expired or from the future; set the clock right: %w",
			p.Skew, p.Encoded.UTC().Format(time.RFC3339), tasks.ErrNotSatisfied)
	}
	return nil
}

func (s munge) Verify(ctx context.Context, h host.Prober) error {
	if s.before() {
		return nil
	}
	st, err := h.Unit(ctx, MungeUnit)
	if err != nil {
		return err
	}
	if st.Active != "active" || !enabled(st) {
		return fmt.Errorf("unit %s is %s: %w", MungeUnit, describe(st), tasks.ErrNotSatisfied)
	}
	return nil
}

// Undo has munged as it was. With another key it is done on both sides of the
// key's step: the last one has munged read the key that was.
func (s munge) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was slurmv1.SlurmdObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	if s.args.GetRestart() || !was.GetActive() {
		if err := h.StopUnit(ctx, MungeUnit); err != nil {
			return err
		}
	}
	st, err := h.Unit(ctx, MungeUnit)
	if err != nil {
		return err
	}
	if enabled(st) != was.GetEnabled() {
		if err := h.SetUnitEnabled(ctx, MungeUnit, was.GetEnabled()); err != nil {
			return err
		}
	}
	if !was.GetActive() || !s.before() && s.args.GetRestart() {
		return nil
	}
	return h.StartUnit(ctx, MungeUnit)
}

type stopSlurmd struct{ args *slurmv1.SlurmdStopStep }

// StopSlurmd returns the step that stops slurmd, and has the controller forget
// the node when that is asked for: in this order, as a slurmd that runs does not
// register again. Its undo starts slurmd with the configuration that was there.
func StopSlurmd(args *slurmv1.SlurmdStopStep) tasks.Step { return stopSlurmd{args} }

func (s stopSlurmd) Args() proto.Message { return s.args }

// Timeout implements [tasks.Limiter].
func (s stopSlurmd) Timeout() time.Duration { return slurmTime }

func (s stopSlurmd) Title() string {
	if s.args.GetForget() {
		return "stop slurmd and have Slurm's controller forget node " + s.args.GetNode()
	}
	return "stop slurmd"
}

func (s stopSlurmd) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observeSlurmd(ctx, h, slurmRef(s.args.GetNode(), s.args.GetControllers()), nil)
}

func observeSlurmd(ctx context.Context, h host.Reader, ref host.SlurmRef, owners []string) ([]byte, error) {
	st, err := h.Unit(ctx, SlurmdUnit)
	if err != nil {
		return nil, err
	}
	o := &slurmv1.SlurmdObserved{Active: active(st), Enabled: enabled(st)}
	n, err := h.SlurmNode(ctx, ref)
	if err == nil {
		o.Answered, o.Known = true, n.Known
		if slices.ContainsFunc(owners, n.DrainedBy) {
			o.DrainReason = n.Reason
		}
	} else if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("the node lacks a program of Slurm, and no package brought it (in Debian they are in slurm-client and slurmd): %w", err)
	} else if !errors.Is(err, host.ErrSlurm) {
		return nil, err
	}
	return encode(o)
}

// foreignDrain fails when somebody else has drained the node: the controller
// forgets that with the node.
func (s stopSlurmd) foreignDrain(ctx context.Context, h host.Reader) error {
	if !s.args.GetKeepDrain() {
		return nil
	}
	n, err := h.SlurmNode(ctx, slurmRef(s.args.GetNode(), s.args.GetControllers()))
	if err == nil && n.Drained() && (!strings.HasPrefix(n.Reason, ownTags) || n.DrainedBy(OwnerDrain)) {
		err = reasonError(tasks.ReasonSlurmForeignDrain, "node %s is drained by somebody else, %q, which the controller would forget when the node registers anew: end that drain first: %w",
			n.Name, n.Reason, host.ErrNotOurs)
	}
	return err
}

func (s stopSlurmd) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	if err := s.foreignDrain(ctx, h); err != nil {
		return nil, err
	}
	if err := h.StopUnit(ctx, SlurmdUnit); err != nil {
		return nil, err
	}
	if err := h.SetUnitEnabled(ctx, SlurmdUnit, false); err != nil {
		return nil, err
	}
	if !s.args.GetForget() {
		return nil, nil
	}
	return nil, forget(ctx, h, slurmRef(s.args.GetNode(), s.args.GetControllers()))
}

// forget removes a node from the controller, which refuses while it still sees
// the last job go.
func forget(ctx context.Context, h host.Host, ref host.SlurmRef) error {
	var last error
	_, err := waitFor(ctx, settleTime, func() (bool, error) {
		last = h.DeleteSlurmNode(ctx, ref)
		return last == nil || !errors.Is(last, host.ErrSlurm), nil
	})
	return errors.Join(err, last)
}

func (s stopSlurmd) Verify(ctx context.Context, h host.Prober) error {
	st, err := h.Unit(ctx, SlurmdUnit)
	if err != nil {
		return err
	}
	if active(st) || enabled(st) {
		return fmt.Errorf("unit %s is %s: %w", SlurmdUnit, describe(st), tasks.ErrNotSatisfied)
	}
	if !s.args.GetForget() {
		return nil
	}
	n, err := h.SlurmNode(ctx, slurmRef(s.args.GetNode(), s.args.GetControllers()))
	if err == nil && n.Known {
		err = fmt.Errorf("the controller still knows node %s as %s: %w", n.Name, strings.Join(n.States, "+"), tasks.ErrNotSatisfied)
	}
	return err
}

func (s stopSlurmd) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was slurmv1.SlurmdObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	if err := reload(ctx, h, SlurmdUnit); err != nil {
		return err
	}
	st, err := h.Unit(ctx, SlurmdUnit)
	if err != nil {
		return err
	}
	if enabled(st) != was.GetEnabled() {
		if err := h.SetUnitEnabled(ctx, SlurmdUnit, was.GetEnabled()); err != nil {
			return err
		}
	}
	if !was.GetActive() || active(st) {
		return nil
	}
	if err := h.StartUnit(ctx, SlurmdUnit); err != nil || !was.GetKnown() {
		return err
	}
	ref := slurmRef(s.args.GetNode(), s.args.GetControllers())
	back, err := waitFor(ctx, registerTime, func() (bool, error) {
		n, err := h.SlurmNode(ctx, ref)
		return err == nil && n.Known && !n.Is("DOWN"), nil
	})
	if err == nil && !back {
		err = fmt.Errorf("slurmd was started again and node %s has not registered: %w", s.args.GetNode(), tasks.ErrNotSatisfied)
	}
	return err
}
