package step

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

type setMount struct{ args *taskv1.MountUnitStep }

// SetMount returns the step that mounts (START) or unmounts (STOP) through a
// native mount unit whose file is in place. What counts is the kernel's mount
// table, never the state of the unit. It unmounts only what its arguments name,
// and nothing on which another mount stands.
func SetMount(args *taskv1.MountUnitStep) tasks.Step { return setMount{args} }

func (s setMount) Args() proto.Message { return s.args }

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
	return &taskv1.MountObserved{
		Enabled: enabled(st), Mounted: depth > 0, Source: m.Source, Fstype: m.FSType,
		Root: m.Root, ReadOnly: depth > 0 && m.ReadOnly(),
	}
}

func (s setMount) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	switch s.args.GetAction() {
	case taskv1.UnitAction_UNIT_ACTION_START:
		return nil, s.mount(ctx, h)
	case taskv1.UnitAction_UNIT_ACTION_STOP:
		return nil, s.unmount(ctx, h)
	default:
		return nil, fmt.Errorf("%s: no such action on a mount", s.args.GetAction())
	}
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

func (s setMount) unmount(ctx context.Context, h host.Host) error {
	where := s.args.GetWhere()
	table, err := h.Mounts(ctx)
	if err != nil {
		return err
	}
	m, depth := MountAt(table, where)
	if depth > 0 && !s.named(m) {
		return fmt.Errorf("unmount %s: %s of type %s has been mounted there meanwhile", where, m.Source, m.FSType)
	}
	// Systemd stops the units of mounts below with their parent's.
	if below := MountsBelow(table, where); depth > 0 && len(below) > 0 {
		return &tasks.ReasonError{Reason: tasks.ReasonBusy, Err: fmt.Errorf("unmount %s: %s is mounted below it: %w",
			where, strings.Join(below, ", "), host.ErrBusy)}
	}
	if err := s.stopUnit(ctx, h); err != nil {
		if errors.Is(err, host.ErrBusy) {
			return &tasks.ReasonError{Reason: tasks.ReasonBusy, Err: fmt.Errorf("unmount %s: %w", where, err)}
		}
		return err
	}
	return h.SetUnitEnabled(ctx, s.args.GetUnit(), false)
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
	return len(compareSource(table, m, s.args)) == 0
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
