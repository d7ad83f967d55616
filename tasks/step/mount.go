package step

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// releaseTimeout bounds each stage of an unmount that may go further than to
// stop the unit, which has a time of its own.
const releaseTimeout = 45 * time.Second

// ReleasedHow says how far a step went to unmount.
type ReleasedHow string

// The stages, each further than the one before.
const (
	ReleasedOrderly ReleasedHow = "stopped"
	ReleasedByForce ReleasedHow = "forced"
	ReleasedByAbort ReleasedHow = "aborted"
	ReleasedLazily  ReleasedHow = "lazy"
	releasedNothing ReleasedHow = ""
)

type setMount struct{ args *taskv1.MountUnitStep }

// patient is a mount that is tried again, since its server may answer later.
type patient struct{ setMount }

var _ tasks.Retrier = patient{}

// Retry implements [tasks.Retrier].
func (s patient) Retry() (attempts uint32, backOff time.Duration) {
	return s.args.GetAttempts(), s.args.GetBackOff().AsDuration()
}

// SetMount returns the step that mounts (START) or unmounts (STOP) through a
// native mount unit whose file is in place. What counts is the kernel's mount
// table, never the state of the unit. It unmounts only what its arguments name,
// and nothing on which another mount stands.
func SetMount(args *taskv1.MountUnitStep) tasks.Step {
	if args.GetAttempts() > 1 {
		return patient{setMount{args}}
	}
	return setMount{args}
}

func (s setMount) Args() proto.Message { return s.args }

// Released decodes what the Apply of a step that unmounts returned.
func Released(out []byte) (ReleasedHow, error) {
	var r taskv1.MountReleased
	if err := decode(out, &r); err != nil {
		return releasedNothing, err
	}
	return ReleasedHow(r.GetHow()), nil
}

func (s setMount) Title() string {
	if s.stop() {
		return fmt.Sprintf("unmount %s and disable %s", s.args.GetWhere(), s.args.GetUnit())
	}
	return fmt.Sprintf("mount %s on %s and enable %s", s.args.GetSource(), s.args.GetWhere(), s.args.GetUnit())
}

func (s setMount) stop() bool { return s.args.GetAction() == taskv1.UnitAction_UNIT_ACTION_STOP }

func (s setMount) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	st, err := h.Unit(ctx, s.args.GetUnit())
	if err != nil {
		return nil, err
	}
	table, err := h.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	return encode(observed(st, table, s.args.GetWhere()))
}

func observed(st host.UnitStatus, table []host.Mount, where string) *taskv1.MountObserved {
	m, depth := MountAt(table, where)
	o := &taskv1.MountObserved{
		Enabled: enabled(st), Mounted: depth > 0, Source: m.Source, Fstype: m.FSType,
		Root: m.Root, ReadOnly: depth > 0 && m.ReadOnly(),
	}
	if slices.Contains(telling, m.FSType) {
		o.Options = strings.Join(m.Super, ",")
	}
	return o
}

// telling are the types whose options in force are part of what a mount is: they
// can be changed by hand, and a unit brings back its own.
var telling = []string{"nfs", "nfs4", "lustre", "wekafs", "ceph"}

func (s setMount) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	switch s.args.GetAction() {
	case taskv1.UnitAction_UNIT_ACTION_START:
		return nil, s.mountPatiently(ctx, h)
	case taskv1.UnitAction_UNIT_ACTION_STOP:
		how, err := s.unmount(ctx, h)
		if err != nil {
			return nil, err
		}
		return encode(&taskv1.MountReleased{How: string(how)})
	default:
		return nil, fmt.Errorf("%s: no such action on a mount", s.args.GetAction())
	}
}

// mountPatiently mounts, and marks as passing what a server that comes later may
// mend. Some clients mount first and look for their server then: what does not
// answer is unmounted, for the next try.
func (s setMount) mountPatiently(ctx context.Context, h host.Host) error {
	err := s.mount(ctx, h)
	if s.args.GetAttempts() <= 1 {
		return err
	}
	if err == nil {
		if _, err = h.ProbeCapacity(ctx, s.args.GetWhere()); err == nil {
			return nil
		}
		return tasks.Transient(errors.Join(err, s.stopUnit(ctx, h)))
	}
	if errors.Is(err, host.ErrJob) {
		err = tasks.Transient(err)
	}
	return err
}

func (s setMount) mount(ctx context.Context, h host.Host) error {
	table, err := h.Mounts(ctx)
	if err != nil {
		return err
	}
	if m, depth := MountAt(table, s.args.GetWhere()); depth > 0 && len(CompareMount(table, s.args)) > 0 {
		return fmt.Errorf("mount %s: %s of type %s has been mounted there meanwhile", s.args.GetWhere(), m.Source, m.FSType)
	}
	if err := s.reload(ctx, h); err != nil {
		return err
	}
	if err := h.SetUnitEnabled(ctx, s.args.GetUnit(), true); err != nil {
		return err
	}
	return s.start(ctx, h)
}

// start starts the unit. Systemd notices a mount or unmount by hand a moment
// later, and until then takes the unit to be as it was: a reload makes it look.
func (s setMount) start(ctx context.Context, h host.Host) error {
	if err := h.StartUnit(ctx, s.args.GetUnit()); err != nil {
		return err
	}
	mounted, err := s.mounted(ctx, h)
	if err != nil || mounted {
		return err
	}
	if err := h.Reload(ctx); err != nil {
		return err
	}
	return h.StartUnit(ctx, s.args.GetUnit())
}

// stopUnit stops the unit, also when systemd has not noticed the mount yet.
func (s setMount) stopUnit(ctx context.Context, h host.Host) error {
	if err := h.StopUnit(ctx, s.args.GetUnit()); err != nil {
		return err
	}
	mounted, err := s.mounted(ctx, h)
	if err != nil || !mounted {
		return err
	}
	if err := h.Reload(ctx); err != nil {
		return err
	}
	return h.StopUnit(ctx, s.args.GetUnit())
}

func (s setMount) mounted(ctx context.Context, h host.Reader) (bool, error) {
	table, err := h.Mounts(ctx)
	if err != nil {
		return false, err
	}
	_, depth := MountAt(table, s.args.GetWhere())
	return depth > 0, nil
}

// reload makes systemd read the unit's file when it knows another version, or
// has the unit only from the mount table.
func (s setMount) reload(ctx context.Context, h host.Host) error {
	st, err := h.Unit(ctx, s.args.GetUnit())
	if err != nil {
		return err
	}
	if !st.NeedReload && (st.Load == "not-found" || st.Fragment == unitDir+s.args.GetUnit()) {
		return nil
	}
	return h.Reload(ctx)
}

func (s setMount) unmount(ctx context.Context, h host.Host) (ReleasedHow, error) {
	where := s.args.GetWhere()
	table, err := h.Mounts(ctx)
	if err != nil {
		return releasedNothing, err
	}
	m, depth := MountAt(table, where)
	if depth > 0 && !s.named(m) {
		return releasedNothing, fmt.Errorf("unmount %s: %s of type %s has been mounted there meanwhile", where, m.Source, m.FSType)
	}
	// Systemd stops the units of mounts below with their parent's.
	if below := MountsBelow(table, where); depth > 0 && len(below) > 0 {
		return releasedNothing, &tasks.ReasonError{Reason: tasks.ReasonBusy, Err: fmt.Errorf("unmount %s: %s is mounted below it: %w",
			where, strings.Join(below, ", "), host.ErrBusy)}
	}
	how, err := s.release(ctx, h)
	if err != nil {
		if errors.Is(err, host.ErrBusy) {
			return releasedNothing, &tasks.ReasonError{Reason: tasks.ReasonBusy, Err: fmt.Errorf("unmount %s: %w", where, err)}
		}
		return releasedNothing, err
	}
	if depth == 0 {
		how = releasedNothing
	}
	return how, h.SetUnitEnabled(ctx, s.args.GetUnit(), false)
}

// release goes from stage to stage, as far as it may, until nothing is mounted.
// The error is that of the first: it names who uses the mount.
func (s setMount) release(ctx context.Context, h host.Host) (ReleasedHow, error) {
	first := s.stopUnit(ctx, h)
	stuck := errors.Is(first, host.ErrJob) || errors.Is(first, host.ErrBusy)
	if !stuck || s.args.GetRelease() == taskv1.MountRelease_MOUNT_RELEASE_UNSPECIFIED {
		return ReleasedOrderly, first
	}
	for _, stage := range []struct {
		how     ReleasedHow
		allowed bool
		do      func(context.Context, string) error
	}{
		{ReleasedByForce, true, h.ForceUnmount},
		{ReleasedByAbort, true, h.AbortFuse},
		{ReleasedLazily, s.args.GetRelease() == taskv1.MountRelease_MOUNT_RELEASE_LAZY, h.LazyUnmount},
	} {
		if !stage.allowed {
			continue
		}
		if gone, err := s.stage(ctx, h, stage.do); err != nil {
			first = fmt.Errorf("%w; %s: %w", first, stage.how, err)
		} else if gone {
			return stage.how, nil
		}
	}
	return releasedNothing, first
}

// stage does one thing to a mount, then has systemd stop the unit, and reports
// whether nothing is mounted any more.
func (s setMount) stage(ctx context.Context, h host.Host, do func(context.Context, string) error) (gone bool, err error) {
	limited, done := context.WithTimeout(ctx, releaseTimeout)
	defer done()
	if err := do(limited, s.args.GetWhere()); err != nil {
		return false, err
	}
	mounted, err := s.mounted(limited, h)
	if err != nil {
		return false, err
	}
	err = s.stopUnit(limited, h)
	if !mounted {
		return true, err
	}
	if err != nil {
		return false, nil // it is still in use; the next stage has its turn
	}
	mounted, err = s.mounted(limited, h)
	return !mounted, err
}

// named reports whether m is what a STOP step is to unmount.
func (s setMount) named(m host.Mount) bool {
	return m.Source == s.args.GetSource() && m.FSType == s.args.GetFstype()
}

func (s setMount) Verify(ctx context.Context, h host.Prober) error {
	st, err := h.Unit(ctx, s.args.GetUnit())
	if err != nil {
		return err
	}
	table, err := h.Mounts(ctx)
	if err != nil {
		return err
	}
	if s.stop() {
		if m, depth := MountAt(table, s.args.GetWhere()); depth > 0 {
			return fmt.Errorf("%s is mounted on %s: %w", m.Source, s.args.GetWhere(), tasks.ErrNotSatisfied)
		}
		if enabled(st) {
			return fmt.Errorf("unit %s is enabled: %w", s.args.GetUnit(), tasks.ErrNotSatisfied)
		}
		return nil
	}
	for _, d := range CompareMount(table, s.args) {
		return fmt.Errorf("mount %s %s: have %q, want %q (unit is %s): %w",
			s.args.GetWhere(), d.What, d.Have, d.Want, describe(st), tasks.ErrNotSatisfied)
	}
	if !enabled(st) {
		return fmt.Errorf("unit %s is not enabled: %w", s.args.GetUnit(), tasks.ErrNotSatisfied)
	}
	return nil
}

func (s setMount) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was taskv1.MountObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	if s.stop() {
		return s.restore(ctx, h, &was)
	}
	table, err := h.Mounts(ctx)
	if err != nil {
		return err
	}
	m, depth := MountAt(table, s.args.GetWhere())
	// What someone else has mounted there meanwhile is not the step's to unmount.
	if !was.GetMounted() && (depth == 0 || s.started(table, m)) {
		if below := MountsBelow(table, s.args.GetWhere()); depth > 0 && len(below) > 0 {
			return fmt.Errorf("unmount %s: %s is mounted below it: %w", s.args.GetWhere(), strings.Join(below, ", "), host.ErrBusy)
		}
		// Also of one that is not mounted: that resets a unit that has failed.
		if err := s.stopUnit(ctx, h); err != nil {
			return err
		}
	}
	return s.setEnabled(ctx, h, was.GetEnabled())
}

// started reports whether m can be what the unit mounts, even where that is not
// all that a START step wants.
func (s setMount) started(table []host.Mount, m host.Mount) bool {
	if s.args.GetFstype() == FSTypeBind {
		over, ok := MountOver(table, s.args.GetSource())
		return ok && over.Dev == m.Dev
	}
	// A client may give the mount another type than it should: it is the step's
	// all the same, and has to go.
	return sameSource(m, s.args)
}

// restore mounts again what a STOP step unmounted, as far as the unit can.
func (s setMount) restore(ctx context.Context, h host.Host, was *taskv1.MountObserved) error {
	if err := s.reload(ctx, h); err != nil {
		return err
	}
	if err := s.setEnabled(ctx, h, was.GetEnabled()); err != nil {
		return err
	}
	if !was.GetMounted() {
		return nil
	}
	if err := s.start(ctx, h); err != nil {
		return err
	}
	st, err := h.Unit(ctx, s.args.GetUnit())
	if err != nil {
		return err
	}
	table, err := h.Mounts(ctx)
	if err != nil {
		return err
	}
	if now := observed(st, table, s.args.GetWhere()); !proto.Equal(now, was) {
		return fmt.Errorf("mount %s: what was mounted there by hand cannot be mounted again by its unit: %w",
			s.args.GetWhere(), tasks.ErrIrreversible)
	}
	return nil
}

func (s setMount) setEnabled(ctx context.Context, h host.Host, want bool) error {
	st, err := h.Unit(ctx, s.args.GetUnit())
	if err != nil || enabled(st) == want {
		return err
	}
	return h.SetUnitEnabled(ctx, s.args.GetUnit(), want)
}
