package storage

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

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
		Kind: "storage.unmount", Revision: 1, Class: tasks.State,
		Summary: "unmount what storage.mount mounted, and keep it unmounted",
	}
}

// Validate implements [tasks.Task].
func (Unmount) Validate(s *storagev1.UnmountSpec) error {
	var p tasks.Problems
	checkTarget(&p, "target", s.GetTarget())
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
	if !s.written && !s.enabled() {
		return tasks.Plan{}, nil
	}
	if err := s.checkOurs(); err != nil {
		return tasks.Plan{}, err
	}
	if err := s.checkRelease(ctx, h); err != nil {
		return tasks.Plan{}, err
	}
	p := tasks.Plan{Differences: s.leftovers()}
	p.Steps = append(p.Steps, s.stop())
	if s.written {
		p.Steps = append(p.Steps, step.RemoveFile(&taskv1.RemoveFileStep{Path: unitPath(s.target)}))
	}
	p.Steps = append(p.Steps, s.reload())
	return p, nil
}

// checkOurs refuses when something else is mounted than what the unit file
// says: somebody has put it there by hand.
func (s *survey) checkOurs() error {
	if s.depth == 0 {
		return nil
	}
	u := settings(s.content)
	m := &taskv1.MountUnitStep{
		Where: s.target, Source: u.setting("Mount.What"), Fstype: u.setting("Mount.Type"), ReadOnly: s.mount.ReadOnly(),
	}
	switch m.GetFstype() {
	case "none":
		m.Fstype = step.FSTypeBind
	case "glusterfs":
		// The client may name another of its servers.
		m.Fstype, m.Source = typeGluster, sameVolume(m.GetSource(), s.mount.Source)
	}
	for _, d := range step.CompareMount(s.table, m) {
		return unfit("%s %s of what is mounted on %s is not the unit's (%s): run storage.mount again to put it right, or unmount it by hand",
			d.What, d.Have, s.target, d.Want)
	}
	return nil
}

// sameVolume returns the name that the mount table gives a volume, when only its
// server is another than in want.
func sameVolume(want, have string) string {
	_, wantVolume, _ := strings.Cut(want, ":")
	if _, volume, ok := strings.Cut(have, ":"); ok && volume == wantVolume {
		return have
	}
	return want
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
	return diffs
}

// Verify implements [tasks.Task].
func (Unmount) Verify(ctx context.Context, h host.Prober, spec *storagev1.UnmountSpec) error {
	s, err := look(ctx, h, spec.GetTarget())
	if err != nil {
		return err
	}
	for _, d := range s.leftovers() {
		return fmt.Errorf("%s: have %q, want nothing: %w", d.Subject, d.Have, tasks.ErrNotSatisfied)
	}
	return nil
}

// Result implements [tasks.Task].
func (Unmount) Result(_ context.Context, _ host.Prober, spec *storagev1.UnmountSpec, _ [][]byte) (proto.Message, error) {
	return &storagev1.UnmountResult{Unit: MountUnit(spec.GetTarget())}, nil
}
