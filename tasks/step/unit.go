package step

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// unitDir is where unit files of the administrator, and ours, stand.
const unitDir = "/etc/systemd/system/"

type setUnit struct{ args *taskv1.UnitStep }

// SetUnit returns the step that starts, stops or restarts a unit, or makes
// systemd forget an older version of its file.
func SetUnit(args *taskv1.UnitStep) tasks.Step { return setUnit{args} }

func (s setUnit) Args() proto.Message { return s.args }

func (s setUnit) Title() string {
	u := s.args.GetUnit()
	switch s.args.GetAction() {
	case taskv1.UnitAction_UNIT_ACTION_START:
		return "start and enable " + u
	case taskv1.UnitAction_UNIT_ACTION_STOP:
		return "stop and disable " + u
	case taskv1.UnitAction_UNIT_ACTION_RESTART:
		return "restart " + u
	case taskv1.UnitAction_UNIT_ACTION_DAEMON_RELOAD:
		return "have systemd read the file of " + u
	default:
		return "do nothing to " + u
	}
}

func (s setUnit) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	st, err := h.Unit(ctx, s.args.GetUnit())
	if err != nil {
		return nil, err
	}
	return encode(&taskv1.UnitObserved{Active: active(st), Enabled: enabled(st)})
}

func (s setUnit) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	u := s.args.GetUnit()
	if s.args.GetAction() == taskv1.UnitAction_UNIT_ACTION_STOP {
		if err := h.StopUnit(ctx, u); err != nil {
			return nil, err
		}
		return nil, h.SetUnitEnabled(ctx, u, false)
	}
	if err := reload(ctx, h, u); err != nil {
		return nil, err
	}
	switch s.args.GetAction() {
	case taskv1.UnitAction_UNIT_ACTION_DAEMON_RELOAD:
		return nil, nil
	case taskv1.UnitAction_UNIT_ACTION_RESTART:
		if err := h.StopUnit(ctx, u); err != nil {
			return nil, err
		}
		return nil, h.StartUnit(ctx, u)
	case taskv1.UnitAction_UNIT_ACTION_START:
		if err := h.SetUnitEnabled(ctx, u, true); err != nil {
			return nil, err
		}
		return nil, h.StartUnit(ctx, u)
	default:
		return nil, fmt.Errorf("%s: no such action on a unit", s.args.GetAction())
	}
}

func (s setUnit) Verify(ctx context.Context, h host.Prober) error {
	st, err := h.Unit(ctx, s.args.GetUnit())
	if err != nil {
		return err
	}
	var ok bool
	switch s.args.GetAction() {
	case taskv1.UnitAction_UNIT_ACTION_STOP:
		ok = !active(st) && !enabled(st)
	case taskv1.UnitAction_UNIT_ACTION_DAEMON_RELOAD:
		ok = !st.NeedReload
	case taskv1.UnitAction_UNIT_ACTION_RESTART:
		ok = st.Active == "active"
	default:
		// The job of a unit whose condition is not met succeeds, and nothing runs.
		ok = st.Active == "active" && enabled(st)
	}
	if !ok {
		return fmt.Errorf("unit %s is %s: %w", s.args.GetUnit(), describe(st), tasks.ErrNotSatisfied)
	}
	return nil
}

func (s setUnit) Undo(ctx context.Context, h host.Host, before []byte) error {
	u := s.args.GetUnit()
	if s.args.GetAction() == taskv1.UnitAction_UNIT_ACTION_DAEMON_RELOAD {
		return reload(ctx, h, u)
	}
	var was taskv1.UnitObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	if !was.GetActive() {
		if err := h.StopUnit(ctx, u); err != nil {
			return err
		}
	}
	st, err := h.Unit(ctx, u)
	if err != nil {
		return err
	}
	if enabled(st) != was.GetEnabled() {
		if err := h.SetUnitEnabled(ctx, u, was.GetEnabled()); err != nil {
			return err
		}
	}
	if !was.GetActive() || active(st) {
		return nil
	}
	if err := reload(ctx, h, u); err != nil {
		return err
	}
	return h.StartUnit(ctx, u)
}

// reload makes systemd read its unit files again, but only when it knows an
// older version of the unit's: a reload can take devices from containers.
func reload(ctx context.Context, h host.Host, unit string) error {
	st, err := h.Unit(ctx, unit)
	if err != nil || !st.NeedReload {
		return err
	}
	return h.Reload(ctx)
}

func active(st host.UnitStatus) bool {
	return st.Active == "active" || st.Active == "activating" || st.Active == "reloading"
}

func enabled(st host.UnitStatus) bool {
	return st.Enabled == "enabled" || st.Enabled == "enabled-runtime"
}

func describe(st host.UnitStatus) string {
	s := st.Load + ", " + st.Active
	if st.Result != "" && st.Result != "success" {
		s += ", result " + st.Result
	}
	if st.Enabled != "" {
		s += ", " + st.Enabled
	}
	if st.NeedReload {
		s += ", file changed since it was read"
	}
	return s
}
