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

// typeMember is what wipefs calls a disk of an array.
const typeMember = "linux_raid_member"

// ArrayMember names what a disk of the array with that UUID holds.
func ArrayMember(uuid string) string { return Content(typeMember, uuid) }

// FindArray returns the disks that refs name, in their order, and the array that
// stands on exactly those; nil when there is none. One that does not run, since
// disks of it are missing, may stand on some of them only.
func FindArray(ctx context.Context, h host.DiskReader, refs []*taskv1.DiskRef) ([]host.Disk, *host.Disk, error) {
	var members []host.Disk
	var names []string
	for _, ref := range refs {
		d, err := FindDisk(ctx, h, ref)
		if err != nil {
			return nil, nil, err
		}
		members, names = append(members, d), append(names, d.Name)
	}
	all, err := h.Disks(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range all {
		if d.Array == nil || len(d.Array.Members) == 0 {
			continue
		}
		foreign := slices.ContainsFunc(d.Array.Members, func(m string) bool { return !slices.Contains(names, m) })
		if !foreign && (len(d.Array.Members) == len(names) || !d.Array.Active) {
			return members, &d, nil
		}
	}
	return members, nil, nil
}

// WithoutHolder returns a disk as if the array of that name did not stand on it.
func WithoutHolder(d host.Disk, array *host.Disk) host.Disk {
	if array != nil {
		d.Holders = slices.DeleteFunc(slices.Clone(d.Holders), func(name string) bool { return name == array.Name })
	}
	return d
}

type setArray struct{ args *taskv1.ArrayStep }

// SetArray returns the step that makes, assembles or stops a striped array. The
// undo of a new one erases only what has the step's own UUID; what is on an
// array that is stopped or assembled stays.
func SetArray(args *taskv1.ArrayStep) tasks.Step { return setArray{args} }

func (s setArray) Args() proto.Message    { return s.args }
func (s setArray) Timeout() time.Duration { return diskTimeout }
func (s setArray) own() string            { return ArrayMember(s.args.GetUuid()) }

func (s setArray) Title() string {
	what := diskPhrase(&taskv1.DiskRef{Array: s.args.GetDisks()})
	switch s.args.GetAction() {
	case taskv1.ArrayAction_ARRAY_ACTION_MAKE:
		return fmt.Sprintf("make %s, which are empty, as %s", what, s.args.GetDevice())
	case taskv1.ArrayAction_ARRAY_ACTION_ASSEMBLE:
		return fmt.Sprintf("assemble %s as %s", what, s.args.GetDevice())
	default:
		return fmt.Sprintf("stop %s (%s)", what, s.args.GetDevice())
	}
}

func (s setArray) look(ctx context.Context, h host.Reader) (*taskv1.ArrayObserved, error) {
	members, array, err := FindArray(ctx, h, s.args.GetDisks())
	if err != nil {
		return nil, err
	}
	out := &taskv1.ArrayObserved{}
	for _, d := range members {
		contents, err := DiskContents(ctx, h, d)
		if err != nil {
			return nil, err
		}
		out.Disks = append(out.Disks, &taskv1.DiskObserved{Contents: contents})
	}
	if array != nil {
		out.Device, out.Active = array.Name, array.Array.Active
	}
	return out, nil
}

// whole reports whether each disk has this array's mark and nothing else.
func (s setArray) whole(o *taskv1.ArrayObserved) bool {
	return !slices.ContainsFunc(o.GetDisks(), func(d *taskv1.DiskObserved) bool { return !slices.Equal(d.GetContents(), []string{s.own()}) })
}

func (s setArray) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	o, err := s.look(ctx, h)
	if err != nil {
		return nil, err
	}
	return encode(o)
}

func (s setArray) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	if s.args.GetAction() == taskv1.ArrayAction_ARRAY_ACTION_STOP {
		return nil, s.stop(ctx, h)
	}
	o, err := s.look(ctx, h)
	if err != nil {
		return nil, err
	}
	if s.args.GetAction() == taskv1.ArrayAction_ARRAY_ACTION_ASSEMBLE {
		return nil, s.assemble(ctx, h, o)
	}
	// An array that stands there is this step's own, from before a crash, and
	// perhaps half done: nothing was put on it yet.
	if o.GetDevice() != "" {
		if err := s.stop(ctx, h); err != nil {
			return nil, err
		}
	}
	a, err := s.free(ctx, h)
	if err != nil {
		return nil, err
	}
	return nil, h.MakeArray(ctx, a)
}

func (s setArray) assemble(ctx context.Context, h host.Host, o *taskv1.ArrayObserved) error {
	if o.GetActive() {
		return nil
	}
	if !s.whole(o) {
		return fmt.Errorf("assemble %s: not all of them are its members any more", diskPhrase(&taskv1.DiskRef{Array: s.args.GetDisks()}))
	}
	if o.GetDevice() != "" { // begun by somebody and not come up
		if err := s.stop(ctx, h); err != nil {
			return err
		}
	}
	a, err := s.free(ctx, h)
	if err != nil {
		return err
	}
	return h.AssembleArray(ctx, a)
}

// free returns the array of the step, on disks that nothing uses and that hold
// nothing but the array's own mark.
func (s setArray) free(ctx context.Context, h host.Reader) (host.StripedArray, error) {
	a := host.StripedArray{Device: s.args.GetDevice(), UUID: s.args.GetUuid()}
	for _, ref := range s.args.GetDisks() {
		d, _, err := freeDisk(ctx, h, ref, []string{s.own()})
		if err != nil {
			return a, err
		}
		a.Disks = append(a.Disks, d.Name)
	}
	return a, nil
}

func (s setArray) stop(ctx context.Context, h host.Host) error {
	_, array, err := FindArray(ctx, h, s.args.GetDisks())
	if err != nil || array == nil {
		return err
	}
	table, err := h.Mounts(ctx)
	if err != nil {
		return err
	}
	if uses := DiskUses(*array, table); len(uses) > 0 {
		return &tasks.ReasonError{Reason: tasks.ReasonBusy, Err: fmt.Errorf("stop array /dev/%s: %s: %w", array.Name, strings.Join(uses, ", "), host.ErrBusy)}
	}
	if err := h.StopArray(ctx, array.Name); err != nil {
		if errors.Is(err, host.ErrBusy) {
			return &tasks.ReasonError{Reason: tasks.ReasonBusy, Err: err}
		}
		return err
	}
	return nil
}

func (s setArray) Verify(ctx context.Context, h host.Prober) error {
	o, err := s.look(ctx, h)
	if err != nil {
		return err
	}
	if s.args.GetAction() == taskv1.ArrayAction_ARRAY_ACTION_STOP {
		if o.GetDevice() != "" {
			return fmt.Errorf("array /dev/%s still stands: %w", o.GetDevice(), tasks.ErrNotSatisfied)
		}
		return nil
	}
	_, array, err := FindArray(ctx, h, s.args.GetDisks())
	if err != nil {
		return err
	}
	if array == nil || !array.Array.Active || array.Array.Level != "raid0" || !s.whole(o) {
		return fmt.Errorf("%s is not there, or does not run: %w", diskPhrase(&taskv1.DiskRef{Array: s.args.GetDisks()}), tasks.ErrNotSatisfied)
	}
	return nil
}

func (s setArray) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was taskv1.ArrayObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	if s.args.GetAction() == taskv1.ArrayAction_ARRAY_ACTION_STOP {
		o, err := s.look(ctx, h)
		if err != nil {
			return err
		}
		if was.GetDevice() != o.GetDevice() && !was.GetActive() {
			return fmt.Errorf("array %s lacked a disk, and cannot be brought back: %w", was.GetDevice(), tasks.ErrIrreversible)
		}
		if !was.GetActive() {
			return nil
		}
		return s.assemble(ctx, h, o)
	}
	if was.GetActive() {
		return nil
	}
	if err := s.stop(ctx, h); err != nil {
		return err
	}
	if s.args.GetAction() == taskv1.ArrayAction_ARRAY_ACTION_ASSEMBLE {
		return nil
	}
	for i, ref := range s.args.GetDisks() {
		had := was.GetDisks()[i].GetContents()
		if slices.Contains(had, s.own()) {
			continue
		}
		d, contents, err := freeDisk(ctx, h, ref, append(had, s.own()))
		if err != nil {
			return err
		}
		if slices.Contains(contents, s.own()) {
			if err := h.WipeDisk(ctx, d.Name); err != nil {
				return err
			}
		}
	}
	return nil
}
