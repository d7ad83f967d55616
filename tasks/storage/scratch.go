package storage

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	scratchLabel = "mwscratch"
	byUUID       = "/dev/disk/by-uuid/"
)

// Scratch is the kind storage.scratch.
type Scratch struct{}

var (
	_ tasks.Task[*storagev1.ScratchSpec]     = Scratch{}
	_ tasks.Intender[*storagev1.ScratchSpec] = Scratch{}
)

// ScratchInfo describes storage.scratch.
func ScratchInfo() tasks.Info {
	return tasks.Info{
		Kind: "storage.scratch", Revision: 1, Class: tasks.State,
		Summary: "mount a local disk as scratch, and make it anew when it comes back empty",
	}
}

// Locks implements [tasks.Task].
func (Scratch) Locks(s *storagev1.ScratchSpec) []tasks.Lock {
	sum := sha256.Sum256([]byte(step.DiskName(diskRef(s))))
	return []tasks.Lock{{Name: intentKey(s.GetTarget())}, {Name: "disk:" + hex.EncodeToString(sum[:8])}}
}

// Intent implements [tasks.Intender].
func (Scratch) Intent(s *storagev1.ScratchSpec) (string, tasks.IntentChange) {
	return intentKey(s.GetTarget()), tasks.IntentSet
}

func diskRef(s *storagev1.ScratchSpec) *taskv1.DiskRef {
	return &taskv1.DiskRef{Serial: s.GetDisk().GetSerial(), LoopFile: s.GetDisk().GetLoopFile()}
}

func scratchType(s *storagev1.ScratchSpec) string {
	if s.GetFilesystem() == storagev1.ScratchFilesystem_SCRATCH_FILESYSTEM_EXT4 {
		return "ext4"
	}
	return "xfs"
}

// scratchUUID is that of the file system of a spec. It follows from the disk and
// its use alone, so that what is made anew is known by the same one.
func scratchUUID(s *storagev1.ScratchSpec) string {
	name := strings.Join([]string{"millwright scratch", scratchType(s), s.GetTarget(), step.DiskName(diskRef(s))}, "\n")
	return uuid.NewSHA1(uuid.NameSpaceURL, []byte(name)).String()
}

// scratch is what a node has of a spec.
type scratch struct {
	*survey
	disk     host.Disk
	contents []string
	own      string // the file system of the spec, as contents would name it
	content  string // of the unit file, as it should be
	mount    *taskv1.MountUnitStep
}

func lookScratch(ctx context.Context, h host.Reader, spec *storagev1.ScratchSpec) (*scratch, error) {
	s, err := look(ctx, h, spec.GetTarget())
	if err != nil {
		return nil, err
	}
	d, err := step.FindDisk(ctx, h, diskRef(spec))
	if err != nil {
		return nil, err
	}
	contents, err := step.DiskContents(ctx, h, d)
	if err != nil {
		return nil, err
	}
	content, err := scratchUnit(spec)
	if err != nil {
		return nil, err
	}
	return &scratch{
		survey: s, disk: d, contents: contents, content: content,
		own: step.Content(scratchType(spec), scratchUUID(spec)),
		mount: &taskv1.MountUnitStep{
			Unit: s.unit, Where: s.target, Source: "/dev/" + d.Name, Fstype: scratchType(spec),
			Action: taskv1.UnitAction_UNIT_ACTION_START,
		},
	}, nil
}

// made reports whether the disk holds the file system and nothing else.
func (s *scratch) made() bool { return slices.Equal(s.contents, []string{s.own}) }

func (s *scratch) differences() []tasks.Difference {
	var diffs []tasks.Difference
	if !s.made() {
		have := strings.Join(s.contents, ", ")
		if have == "" {
			have = "nothing"
		}
		diffs = append(diffs, tasks.Difference{Subject: "disk /dev/" + s.disk.Name, Have: have, Want: s.own})
	}
	for _, d := range step.CompareMount(s.table, s.mount) {
		diffs = append(diffs, tasks.Difference{Subject: strings.TrimSpace("mount " + s.target + " " + d.What), Have: d.Have, Want: d.Want})
	}
	return append(diffs, s.unitDifferences(s.survey.content, s.content)...)
}

// Plan implements [tasks.Task].
func (Scratch) Plan(ctx context.Context, h host.Reader, spec *storagev1.ScratchSpec) (tasks.Plan, error) {
	s, err := lookScratch(ctx, h, spec)
	if err != nil {
		return tasks.Plan{}, err
	}
	p := tasks.Plan{Differences: s.differences()}
	if len(p.Differences) == 0 {
		return p, nil
	}
	missing, err := s.fit(ctx, h, spec)
	if err != nil {
		return tasks.Plan{}, err
	}
	add := func(st tasks.Step) { p.Steps = append(p.Steps, st) }
	if s.stopFirst() {
		if err := s.checkRelease(ctx, h); err != nil {
			return tasks.Plan{}, err
		}
		add(s.stop())
	}
	if !s.made() && len(s.contents) > 0 {
		add(step.WipeDisk(&taskv1.DiskWipeStep{Disk: diskRef(spec), Contents: s.contents}))
	}
	if !s.made() {
		add(step.MakeFilesystem(&taskv1.FilesystemMakeStep{
			Disk: diskRef(spec), Fstype: scratchType(spec), Uuid: scratchUUID(spec), Label: scratchLabel,
		}))
	}
	if missing {
		add(step.MakeDir(&taskv1.DirectoryStep{Path: s.target, Mode: 0o755}))
	}
	if s.survey.content != s.content || len(s.dropIns) > 0 {
		add(s.reload())
	}
	for _, d := range s.dropIns {
		add(step.RemoveFile(&taskv1.RemoveFileStep{Path: d.path}))
	}
	if s.survey.content != s.content {
		add(step.WriteFile(&taskv1.WriteFileStep{Path: unitPath(s.target), Data: []byte(s.content), Mode: unitMode}))
	}
	add(step.SetMount(s.mount))
	return p, nil
}

// stopFirst reports whether the unit has to be stopped first: something else is
// mounted, or is to be mounted otherwise. For a file system that is to be made it
// is also disabled meanwhile, or a reboot in the middle would mount it before the
// task goes on.
func (s *scratch) stopFirst() bool {
	if !s.made() {
		return s.depth > 0 || s.enabled()
	}
	return s.depth > 0 && (len(step.CompareMount(s.table, s.mount)) > 0 || s.survey.content != s.content || len(s.dropIns) > 0)
}

// fit refuses what the node is not fit for, and says whether the mount point has
// to be made.
func (s *scratch) fit(ctx context.Context, h host.Reader, spec *storagev1.ScratchSpec) (missing bool, err error) {
	if err := s.checkDisk(spec); err != nil {
		return false, err
	}
	if s.depth > 0 && !s.written {
		return false, unfit("mount point %s is in use: %s of type %s is mounted there, and not by Millwright: unmount it, or choose another mount point",
			s.target, s.survey.mount.Source, s.survey.mount.FSType)
	}
	if below := step.MountsBelow(s.table, s.target); s.depth == 0 && len(below) > 0 {
		return false, unfit("mounting on %s would hide %s: unmount that first, or choose another mount point", s.target, strings.Join(below, ", "))
	}
	if err := checkKernel(ctx, h, scratchType(spec)); err != nil {
		return false, err
	}
	if !s.made() {
		if err := checkScratchTools(ctx, h, scratchType(spec)); err != nil {
			return false, err
		}
	}
	return s.checkDirectory(ctx, h)
}

// checkDisk refuses a disk that is in use elsewhere, or that holds anything else
// than this scratch and may not be erased.
func (s *scratch) checkDisk(spec *storagev1.ScratchSpec) error {
	name := fmt.Sprintf("disk %s (/dev/%s)", step.DiskName(diskRef(spec)), s.disk.Name)
	if s.disk.ReadOnly {
		return unfit("%s can only be read: choose another disk", name)
	}
	elsewhere := slices.DeleteFunc(slices.Clone(s.table), func(m host.Mount) bool { return m.Target == s.target })
	if uses := step.DiskUses(s.disk, elsewhere); len(uses) > 0 {
		return unfit("%s is in use, and is not touched: %s: release it, or choose another disk", name, strings.Join(uses, ", "))
	}
	if s.made() || len(s.contents) == 0 {
		return nil
	}
	holds := strings.Join(s.contents, ", ")
	if s.written {
		return unfit("%s came back with something else on it, and is not touched: it holds %s, not %s: look at it; to use it all the same, run storage.unmount, then storage.scratch with wipe: true",
			name, holds, s.own)
	}
	if !spec.GetDisk().GetWipe() {
		return unfit("%s is not empty, and is not touched: it holds %s: choose another disk, or have it erased with its serial and wipe: true", name, holds)
	}
	return nil
}

// Verify implements [tasks.Task]: the disk holds the file system, it is what is
// mounted, the unit brings it back at boot, and what is written can be read back.
func (Scratch) Verify(ctx context.Context, h host.Prober, spec *storagev1.ScratchSpec) error {
	s, err := lookScratch(ctx, h, spec)
	if err != nil {
		return err
	}
	if diffs := s.differences(); len(diffs) > 0 {
		d := diffs[0]
		return fmt.Errorf("%s: have %q, want %q (differences in all: %d): %w", d.Subject, d.Have, d.Want, len(diffs), tasks.ErrNotSatisfied)
	}
	if err := h.ProbeWrite(ctx, s.target); err != nil {
		return fmt.Errorf("write to %s and read back: %w", s.target, err)
	}
	return nil
}

// Result implements [tasks.Task].
func (Scratch) Result(ctx context.Context, h host.Prober, spec *storagev1.ScratchSpec, _ [][]byte) (proto.Message, error) {
	d, err := step.FindDisk(ctx, h, diskRef(spec))
	if err != nil {
		return nil, err
	}
	c, err := h.ProbeCapacity(ctx, spec.GetTarget())
	if err != nil {
		return nil, fmt.Errorf("ask %s for its size: %w", spec.GetTarget(), err)
	}
	return &storagev1.ScratchResult{
		Unit: MountUnit(spec.GetTarget()), Device: "/dev/" + d.Name, Uuid: scratchUUID(spec),
		Fstype: scratchType(spec), CapacityBytes: c.TotalBytes,
	}, nil
}
