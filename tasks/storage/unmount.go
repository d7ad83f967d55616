package storage

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Unmount is the kind storage.unmount. It unmounts only what storage.mount
// mounted.
type Unmount struct{}

var (
	_ tasks.Task[*storagev1.UnmountSpec]     = Unmount{}
	_ tasks.Intender[*storagev1.UnmountSpec] = Unmount{}
)

// UnmountInfo describes storage.unmount.
func UnmountInfo() tasks.Info {
	return tasks.Info{
		Kind: "storage.unmount", Revision: 3, Class: tasks.State,
		Since:   map[protoreflect.Name]uint32{"policy": 2, "wait_for_jobs": 3},
		Summary: "unmount what storage.mount mounted, and keep it unmounted",
	}
}

// Validate implements [tasks.Task].
func (Unmount) Validate(s *storagev1.UnmountSpec) error {
	var p tasks.Problems
	checkTarget(&p, "target", s.GetTarget())
	checkEnum(&p, "policy", s.GetPolicy())
	tasks.CheckJobWait(&p, s.GetWaitForJobs())
	return p.Err()
}

// Locks implements [tasks.Task].
func (Unmount) Locks(s *storagev1.UnmountSpec) []tasks.Lock {
	return []tasks.Lock{{Name: intentKey(s.GetTarget())}}
}

// Intent implements [tasks.Intender].
func (Unmount) Intent(s *storagev1.UnmountSpec) (string, tasks.IntentChange) {
	return intentKey(s.GetTarget()), tasks.IntentRemove
}

// Plan implements [tasks.Task].
func (Unmount) Plan(ctx context.Context, h host.Reader, spec *storagev1.UnmountSpec) (tasks.Plan, error) {
	s, err := look(ctx, h, spec.GetTarget())
	if err != nil {
		return tasks.Plan{}, err
	}
	if !s.written && s.depth > 0 {
		return tasks.Plan{}, unfit("%s of type %s is mounted on %s, and not by Millwright: unmount it by hand", s.mount.Source, s.mount.FSType, s.target)
	}
	if err := s.lookKey(ctx, h, keyFile{}); err != nil {
		return tasks.Plan{}, err
	}
	if !s.written && !s.enabled() && !s.key.leftover {
		return tasks.Plan{}, nil
	}
	if err := s.checkOurs(ctx, h); err != nil {
		return tasks.Plan{}, err
	}
	if err := s.checkRelease(ctx, h); err != nil {
		return tasks.Plan{}, err
	}
	p := tasks.Plan{Differences: s.leftovers(), Disturbs: s.disturbs("unmounts "+s.target, spec.GetWaitForJobs())}
	p.Steps = append(p.Steps, s.release(spec.GetPolicy()))
	stop, err := s.stopStripe(ctx, h, spec.GetPolicy())
	if err != nil {
		return tasks.Plan{}, err
	}
	p.Steps = append(p.Steps, stop...)
	if s.written {
		p.Steps = append(p.Steps, step.RemoveFile(&taskv1.RemoveFileStep{Path: unitPath(s.target)}))
	}
	p.Steps = append(p.Steps, s.keySteps()...)
	p.Steps = append(p.Steps, s.reload())
	return p, nil
}

// checkOurs refuses when something else is mounted than what the unit file
// says: somebody has put it there by hand.
func (s *survey) checkOurs(ctx context.Context, h host.Reader) error {
	if s.depth == 0 {
		return nil
	}
	u := settings(s.content)
	want := s.unitMount(u.setting("Mount.What"), u.setting("Mount.Type"), u.setting("Mount.Options"))
	if ref := scratchRef(u); ref != nil {
		d, err := step.FindDisk(ctx, h, ref)
		if err != nil {
			return err
		}
		want.Source = "/dev/" + d.Name
	}
	for _, d := range step.CompareMount(s.table, want) {
		return unfit("%s %s of what is mounted on %s is not the unit's (%s): run storage.mount again to put it right, or unmount it by hand",
			d.What, d.Have, s.target, d.Want)
	}
	return nil
}

// unitMount is what the mount table shows of what a mount unit mounts, as far as
// the unit tells: a client may name another of its servers, or a disk by the
// name that it has now.
func (s *survey) unitMount(what, unitType, options string) *taskv1.MountUnitStep {
	m := &taskv1.MountUnitStep{Where: s.target, Source: what, Fstype: unitType, ReadOnly: s.mount.ReadOnly()}
	switch unitType {
	case "none":
		m.Fstype = step.FSTypeBind
	case "glusterfs":
		m.Fstype, m.AnyServer = typeGluster, true
	case "nfs":
		if s.mount.FSType == "nfs4" {
			m.Fstype = "nfs4"
		}
	case "ceph":
		m.AnyServer = true
	case "wekafs", typeExt4, typeXFS:
		m.Source = s.mount.Source // its name is the client's or the kernel's own
	case "fuse.s3fs":
		m.Source, _ = option(strings.Split(options, ","), "fsname")
	case "mount-s3":
		m.Fstype, m.Source = "fuse", "mountpoint-s3"
	case "rclone":
		m.Fstype = "fuse.rclone"
	}
	return m
}

// release returns the step that unmounts, as far as the policy lets it.
func (s *survey) release(policy storagev1.UnmountPolicy) tasks.Step {
	args := s.stopArgs()
	switch policy {
	case storagev1.UnmountPolicy_UNMOUNT_POLICY_FORCE:
		args.Release = taskv1.MountRelease_MOUNT_RELEASE_FORCE
	case storagev1.UnmountPolicy_UNMOUNT_POLICY_LAZY:
		args.Release = taskv1.MountRelease_MOUNT_RELEASE_LAZY
	default: // in order, or not at all
	}
	return step.SetMount(args)
}

func (s *survey) leftovers() []tasks.Difference {
	var diffs []tasks.Difference
	if s.depth > 0 {
		diffs = append(diffs, tasks.Difference{Subject: "mount " + s.target, Have: fmt.Sprintf("%s (%s)", s.mount.Source, s.mount.FSType)})
	}
	if s.written {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + s.unit, Have: unitPath(s.target)})
	}
	if s.enabled() {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + s.unit + " at boot", Have: s.status.Enabled})
	}
	return append(diffs, s.keyDifferences()...)
}

// Verify implements [tasks.Task].
func (Unmount) Verify(ctx context.Context, h host.Prober, spec *storagev1.UnmountSpec) error {
	s, err := look(ctx, h, spec.GetTarget())
	if err != nil {
		return err
	}
	if err := s.lookKey(ctx, h, keyFile{}); err != nil {
		return err
	}
	for _, d := range s.leftovers() {
		return fmt.Errorf("%s: have %q, want nothing: %w", d.Subject, d.Have, tasks.ErrNotSatisfied)
	}
	return nil
}

// Result implements [tasks.Task].
func (Unmount) Result(_ context.Context, _ host.Prober, spec *storagev1.UnmountSpec, outs [][]byte) (proto.Message, error) {
	r := &storagev1.UnmountResult{Unit: MountUnit(spec.GetTarget())}
	if len(outs) > 0 {
		how, err := step.Released(outs[0])
		if err != nil {
			return nil, err
		}
		r.How, r.RebootNeeded = string(how), how == step.ReleasedLazily
	}
	return r, nil
}
