package step

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	// migTime is for one change of a GPU: destroying an instance takes a second or
	// so, a reset some ten.
	migTime = 5 * time.Minute
	// QuarantineMark begins the path of the file that says that a GPU could not be
	// brought to any layout that somebody wanted. A boot takes it away.
	QuarantineMark = "/run/millwright-quarantine-"
)

// changeMIG is one change of a GPU's layout. Whatever it changes, it settles the
// whole layout that is to stand after it, and its undo the one that stood before
// the plan: the steps of a GPU are undone together by the first of them.
type changeMIG struct {
	args   proto.Message
	change *migv1.MigChange
	apply  func(ctx context.Context, h host.Host, c *migv1.MigChange) error
	check  func(ctx context.Context, h host.Reader, c *migv1.MigChange) error
	looks  bool // it changes nothing, and has nothing to undo
}

// InspectMIG returns the step that sees that a GPU still has no more than it had
// when the plan was made: jobs may have been waited for since. One that restores
// makes it again when it is undone.
func InspectMIG(args *migv1.MigInspectStep) tasks.Step {
	return changeMIG{
		args: args, change: args.GetChange(), apply: inspectMIG, looks: !args.GetRestores(),
		check: func(context.Context, host.Reader, *migv1.MigChange) error { return nil },
	}
}

func inspectMIG(ctx context.Context, h host.Host, c *migv1.MigChange) error {
	st, err := h.GPUState(ctx, c.GetGpu())
	if err != nil {
		return gpuError(c.GetName(), err)
	}
	have := MIGLayout(st)
	for _, in := range have.GetInstances() {
		if !slices.ContainsFunc(c.GetWas().GetInstances(), func(w *migv1.LayoutInstance) bool { return sameInstance(in, w) }) {
			return reasonError(tasks.ReasonGPUChanged, "%s had %s when this was planned, and somebody has changed it to %s since: plan again: %w",
				c.GetName(), DescribeMIGLayout(c.GetWas()), DescribeMIGLayout(have), tasks.ErrNotSatisfied)
		}
	}
	return nil
}

// ClearMIG returns the step that removes a GPU instance, its compute instances
// first.
func ClearMIG(args *migv1.MigClearStep) tasks.Step {
	return settled(args, args.GetChange())
}

// CreateMIG returns the step that makes a GPU instance at its place, with its
// compute instances.
func CreateMIG(args *migv1.MigCreateStep) tasks.Step {
	return settled(args, args.GetChange())
}

// VerifyMIG returns the step that reads a GPU again and sees that it has the whole
// layout. What a reboot or reset took meanwhile is made again.
func VerifyMIG(args *migv1.MigVerifyStep) tasks.Step {
	return settled(args, args.GetChange())
}

// ActivateMIG returns the step that has a pending MIG mode become active, by a
// reset of this GPU alone where that is still needed.
func ActivateMIG(args *migv1.MigActivateStep) tasks.Step {
	return settled(args, args.GetChange())
}

func settled(args proto.Message, c *migv1.MigChange) tasks.Step {
	return changeMIG{
		args: args, change: c,
		apply: func(ctx context.Context, h host.Host, c *migv1.MigChange) error {
			return settleMIG(ctx, h, c, c.GetTo())
		},
		check: func(ctx context.Context, h host.Reader, c *migv1.MigChange) error {
			return checkMIG(ctx, h, c, c.GetTo())
		},
	}
}

// SetMIGMode returns the step that stores the MIG mode. Where that is to be
// active without a reset it has to be so afterwards.
func SetMIGMode(args *migv1.MigModeStep) tasks.Step {
	if !args.GetPending() {
		return settled(args, args.GetChange())
	}
	return changeMIG{
		args: args, change: args.GetChange(),
		apply: func(ctx context.Context, h host.Host, c *migv1.MigChange) error {
			st, err := h.GPUState(ctx, c.GetGpu())
			if err != nil {
				return gpuError(c.GetName(), err)
			}
			_, err = storeMode(ctx, h, c, st, c.GetTo().GetEnabled())
			return err
		},
		check: func(ctx context.Context, h host.Reader, c *migv1.MigChange) error {
			st, err := h.GPUState(ctx, c.GetGpu())
			if err == nil && st.Pending != c.GetTo().GetEnabled() {
				err = fmt.Errorf("MIG mode %s is not stored: %w", onOff(c.GetTo().GetEnabled()), tasks.ErrNotSatisfied)
			}
			return gpuError(c.GetName(), err)
		},
	}
}

func (s changeMIG) Args() proto.Message { return s.args }

// Timeout implements [tasks.Limiter].
func (s changeMIG) Timeout() time.Duration { return migTime }

func (s changeMIG) Title() string { return s.change.GetWhat() }

// Observe returns nothing: the plan has the layout that was, and the first step
// of a GPU sees that it still stands.
func (s changeMIG) Observe(context.Context, host.Reader) ([]byte, error) { return nil, nil }

func (s changeMIG) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	return nil, s.apply(ctx, h, s.change)
}

func (s changeMIG) Verify(ctx context.Context, h host.Prober) error {
	return s.check(ctx, h, s.change)
}

// Undo brings the layout back that stood before the plan. A GPU for which that
// fails is marked, and left to the first step of the plan, which is undone last:
// what a GPU that is lost cannot have must not keep the others from being undone.
func (s changeMIG) Undo(ctx context.Context, h host.Host, _ []byte) error {
	if s.looks {
		return nil
	}
	if s.change.GetFirstBringsBack() {
		if there, err := markedGPU(ctx, h, s.change); err != nil || there {
			return err
		}
	}
	err := bringBack(ctx, h, s.change)
	if err == nil || !s.change.GetFirstBringsBack() || ctx.Err() != nil {
		return err
	}
	if there, markErr := markedGPU(ctx, h, s.change); markErr != nil || !there {
		return errors.Join(err, markErr)
	}
	return nil
}

func markedGPU(ctx context.Context, h host.Reader, c *migv1.MigChange) (bool, error) {
	_, err := h.Lstat(ctx, QuarantineMark+c.GetGpu())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// bringBack settles the layout that stood before the plan. A GPU for which that
// fails is marked: nothing that was wanted stands on it.
func bringBack(ctx context.Context, h host.Host, c *migv1.MigChange) error {
	mark := QuarantineMark + c.GetGpu()
	if err := settleMIG(ctx, h, c, c.GetWas()); err != nil {
		text := fmt.Sprintf("%s could not be brought back to %s: %v", c.GetName(), DescribeMIGLayout(c.GetWas()), err)
		return errors.Join(fmt.Errorf("%s could not be brought back to %s: %w", c.GetName(), DescribeMIGLayout(c.GetWas()), err),
			h.WriteFile(ctx, mark, host.File{Data: []byte(text + "\n"), Mode: 0o644}))
	}
	there, err := markedGPU(ctx, h, c)
	if err != nil || !there {
		return err
	}
	return h.RemoveFile(ctx, mark)
}

// bringAllBack brings back the GPUs of a plan that are not yet as they were. One
// that cannot be read and was never marked has not been touched, and neither has one
// on which somebody has made something else since the plan: the undo of each step
// before this one has brought back or marked what it touched.
func bringAllBack(ctx context.Context, h host.Host, all []*migv1.MigChange) error {
	var failed []error
	for _, c := range all {
		there, err := markedGPU(ctx, h, c)
		if err == nil && !there {
			if _, err := h.GPUState(ctx, c.GetGpu()); errors.Is(err, host.ErrGPULost) || errors.Is(err, host.ErrGPUUnknown) {
				continue
			}
			var why *tasks.ReasonError
			if err := inspectMIG(ctx, h, c); errors.As(err, &why) && why.Reason == tasks.ReasonGPUChanged {
				continue
			}
		}
		if err == nil {
			err = bringBack(ctx, h, c)
		}
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}
