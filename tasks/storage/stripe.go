package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/google/uuid"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// firstArray is the kernel's own first number for an array that it is to name
// (Documentation/admin-guide/md), from where free ones are looked for downwards.
const firstArray = 127

// stripe is the array of a scratch, as the node has it.
type stripe struct {
	uuid, own string
	device    string // the kernel's name that it has, or is to have
	members   []stripeDisk
	found     *host.Disk // nil: none is assembled
}

type stripeDisk struct {
	ref      *taskv1.DiskRef
	disk     host.Disk
	contents []string
}

func lookStripe(ctx context.Context, h host.Reader, spec *storagev1.ScratchSpec) (*stripe, error) {
	refs := memberRefs(spec)
	disks, found, err := step.FindArray(ctx, h, refs)
	if err != nil {
		return nil, err
	}
	id := uuid.NewSHA1(uuid.NameSpaceURL, []byte("millwright stripe\n"+spec.GetTarget()+"\n"+step.DiskName(diskRef(spec)))).String()
	s := &stripe{uuid: id, own: step.ArrayMember(id), found: found}
	for i, d := range disks {
		contents, err := step.DiskContents(ctx, h, d)
		if err != nil {
			return nil, err
		}
		s.members = append(s.members, stripeDisk{ref: refs[i], disk: d, contents: contents})
	}
	if !slices.ContainsFunc(s.members, func(m stripeDisk) bool { return slices.Contains(m.contents, s.own) }) {
		s.found = nil // it is another's, and in the way
	}
	if s.found != nil {
		s.device = found.Name
		return s, nil
	}
	s.device, err = freeArray(ctx, h)
	return s, err
}

// freeArray returns a name that no array of the node has.
func freeArray(ctx context.Context, h host.Reader) (string, error) {
	disks, err := h.Disks(ctx)
	if err != nil {
		return "", err
	}
	for n := firstArray; n >= 0; n-- {
		name := fmt.Sprintf("md%d", n)
		if !slices.ContainsFunc(disks, func(d host.Disk) bool { return d.Name == name }) {
			return name, nil
		}
	}
	return "", unfit("the node has %d arrays, and no name is left: stop one", firstArray+1)
}

// marked reports whether each disk is a member of this array and nothing else.
func (s *stripe) marked() bool {
	return !slices.ContainsFunc(s.members, func(m stripeDisk) bool { return !slices.Equal(m.contents, []string{s.own}) })
}

// made reports whether the array runs.
func (s *stripe) made() bool { return s.found != nil && s.found.Array.Active && s.marked() }

func (s *stripe) differences() []tasks.Difference {
	var diffs []tasks.Difference
	for _, m := range s.members {
		if !slices.Equal(m.contents, []string{s.own}) {
			diffs = append(diffs, tasks.Difference{Subject: "disk /dev/" + m.disk.Name, Have: orNothing(m.contents), Want: s.own})
		}
	}
	if !s.made() {
		have := "not assembled"
		if s.found != nil && !s.found.Array.Active {
			have = "not active"
		} else if s.found != nil {
			have = "of disks that are not its own any more"
		}
		diffs = append(diffs, tasks.Difference{Subject: "array /dev/" + s.device, Have: have, Want: "RAID0 of " + strings.Join(s.names(), ", ")})
	}
	return diffs
}

func (s *stripe) names() []string {
	var names []string
	for _, m := range s.members {
		names = append(names, "/dev/"+m.disk.Name)
	}
	return names
}

func (s *stripe) step(action taskv1.ArrayAction) tasks.Step {
	var refs []*taskv1.DiskRef
	for _, m := range s.members {
		refs = append(refs, m.ref)
	}
	return step.SetArray(&taskv1.ArrayStep{Disks: refs, Uuid: s.uuid, Device: s.device, Action: action})
}

// prepare returns the steps to an array that runs, and whether what was on it is
// kept. An array of which a disk came back empty has lost everything: what is
// left of it is erased.
func (s *stripe) prepare() (steps []tasks.Step, kept bool) {
	if s.found != nil {
		steps = append(steps, s.step(taskv1.ArrayAction_ARRAY_ACTION_STOP))
	}
	if s.marked() {
		return append(steps, s.step(taskv1.ArrayAction_ARRAY_ACTION_ASSEMBLE)), true
	}
	for _, m := range s.members {
		if len(m.contents) > 0 {
			steps = append(steps, step.WipeDisk(&taskv1.DiskWipeStep{Disk: m.ref, Contents: m.contents}))
		}
	}
	return append(steps, s.step(taskv1.ArrayAction_ARRAY_ACTION_MAKE)), false
}

// check refuses what the node lacks for an array.
func (s *stripe) check(ctx context.Context, h host.Reader) error {
	if _, err := h.FindProgram(ctx, "mdadm"); errors.Is(err, fs.ErrNotExist) {
		return unfit("program mdadm is missing: install package mdadm")
	} else if err != nil {
		return err
	}
	known, err := h.ModuleKnown(ctx, "raid0")
	if err != nil {
		return err
	}
	if !known {
		return unfit("kernel module raid0 is missing: install the one for the kernel that runs")
	}
	return nil
}

// stopStripe returns the step that stops the array below what is unmounted, so
// that its disks are free. Under a lazy unmount the array may be in use still.
func (s *survey) stopStripe(ctx context.Context, h host.Reader, policy storagev1.UnmountPolicy) ([]tasks.Step, error) {
	ref := scratchRef(settings(s.content))
	if len(ref.GetArray()) == 0 || policy == storagev1.UnmountPolicy_UNMOUNT_POLICY_LAZY {
		return nil, nil
	}
	disks, found, err := step.FindArray(ctx, h, ref.GetArray())
	if errors.Is(err, tasks.ErrPrecondition) {
		return nil, nil // a disk is gone, and with it the array
	}
	if err != nil || found == nil {
		return nil, err
	}
	id, err := memberOf(ctx, h, disks[0])
	if err != nil || id == "" {
		return nil, err
	}
	return []tasks.Step{step.SetArray(&taskv1.ArrayStep{
		Disks: ref.GetArray(), Uuid: id, Device: found.Name, Action: taskv1.ArrayAction_ARRAY_ACTION_STOP,
	})}, nil
}

// memberOf returns the UUID of the array of which a disk is a member.
func memberOf(ctx context.Context, h host.Reader, d host.Disk) (string, error) {
	contents, err := step.DiskContents(ctx, h, d)
	if err != nil {
		return "", err
	}
	for _, c := range contents {
		if id, member := strings.CutPrefix(c, step.ArrayMember("")+" "); member {
			return id, nil
		}
	}
	return "", nil
}
