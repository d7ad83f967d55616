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
	_ tasks.Restorer[*storagev1.ScratchSpec] = Scratch{}
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
	locks := []tasks.Lock{{Name: intentKey(s.GetTarget())}}
	for _, d := range scratchDisks(s) {
		sum := sha256.Sum256([]byte(step.DiskName(refOf(d))))
		locks = append(locks, tasks.Lock{Name: "disk:" + hex.EncodeToString(sum[:8])})
	}
	return locks
}

// Intent implements [tasks.Intender].
func (Scratch) Intent(s *storagev1.ScratchSpec) (string, tasks.IntentChange) {
	return intentKey(s.GetTarget()), tasks.IntentSet
}

// ForRestore implements [tasks.Restorer]. A disk is erased for the task that says
// so, and never again without a person, also when its unit file went meanwhile.
func (Scratch) ForRestore(s *storagev1.ScratchSpec) *storagev1.ScratchSpec {
	same := proto.CloneOf(s)
	for _, d := range scratchDisks(same) {
		d.Wipe = false
	}
	return same
}

// scratchDisks are all disks of a spec.
func scratchDisks(s *storagev1.ScratchSpec) []*storagev1.ScratchDisk {
	if s.GetDisk() != nil {
		return []*storagev1.ScratchDisk{s.GetDisk()}
	}
	return s.GetDisks()
}

func refOf(d *storagev1.ScratchDisk) *taskv1.DiskRef {
	return &taskv1.DiskRef{Serial: d.GetSerial(), LoopFile: d.GetLoopFile()}
}

// diskRef names what the file system stands on: the disk, or the array.
func diskRef(s *storagev1.ScratchSpec) *taskv1.DiskRef {
	if s.GetDisk() != nil {
		return refOf(s.GetDisk())
	}
	return &taskv1.DiskRef{Array: memberRefs(s)}
}

func memberRefs(s *storagev1.ScratchSpec) []*taskv1.DiskRef {
	var refs []*taskv1.DiskRef
	for _, d := range s.GetDisks() {
		refs = append(refs, refOf(d))
	}
	return refs
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
	array    *stripe   // nil for a single disk
	disk     host.Disk // what the file system stands on; without a name while there is no array
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
	content, err := scratchUnit(spec)
	if err != nil {
		return nil, err
	}
	out := &scratch{survey: s, content: content, own: step.Content(scratchType(spec), scratchUUID(spec))}
	source := ""
	if spec.GetDisk() == nil {
		if out.array, err = lookStripe(ctx, h, spec); err != nil {
			return nil, err
		}
		source = out.array.device
		if out.array.made() {
			out.disk = *out.array.found
		}
	} else {
		if out.disk, err = step.FindDisk(ctx, h, diskRef(spec)); err != nil {
			return nil, err
		}
		source = out.disk.Name
	}
	if out.disk.Name != "" {
		if out.contents, err = step.DiskContents(ctx, h, out.disk); err != nil {
			return nil, err
		}
	}
	out.mount = &taskv1.MountUnitStep{
		Unit: s.unit, Where: s.target, Source: "/dev/" + source, Fstype: scratchType(spec),
		Action: taskv1.UnitAction_UNIT_ACTION_START,
	}
	return out, nil
}

// made reports whether the disk holds the file system and nothing else.
func (s *scratch) made() bool { return slices.Equal(s.contents, []string{s.own}) }

func (s *scratch) differences() []tasks.Difference {
	var diffs []tasks.Difference
	if s.array != nil {
		diffs = append(diffs, s.array.differences()...)
	}
	if s.disk.Name != "" && !s.made() {
		diffs = append(diffs, tasks.Difference{Subject: "disk /dev/" + s.disk.Name, Have: orNothing(s.contents), Want: s.own})
	}
	for _, d := range step.CompareMount(s.table, s.mount) {
		diffs = append(diffs, tasks.Difference{Subject: strings.TrimSpace("mount " + s.target + " " + d.What), Have: d.Have, Want: d.Want})
	}
	return append(diffs, s.unitDifferences(s.survey.content, s.content)...)
}

func orNothing(contents []string) string {
	if len(contents) == 0 {
		return "nothing"
	}
	return strings.Join(contents, ", ")
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
	add := func(st ...tasks.Step) { p.Steps = append(p.Steps, st...) }
	if s.stopFirst() {
		if err := s.checkRelease(ctx, h); err != nil {
			return tasks.Plan{}, err
		}
		add(s.stop())
		p.Disturbs = s.disturbs("mounts "+s.target+" again", nil)
	}
	add(s.prepare(spec)...)
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

// prepare returns the steps to the file system.
func (s *scratch) prepare(spec *storagev1.ScratchSpec) []tasks.Step {
	filesystem := &taskv1.FilesystemMakeStep{
		Disk: diskRef(spec), Fstype: scratchType(spec), Uuid: scratchUUID(spec), Label: scratchLabel,
	}
	if s.array != nil && !s.array.made() {
		steps, kept := s.array.prepare()
		filesystem.Keep = kept
		return append(steps, step.MakeFilesystem(filesystem))
	}
	var steps []tasks.Step
	if !s.made() && len(s.contents) > 0 {
		steps = append(steps, step.WipeDisk(&taskv1.DiskWipeStep{Disk: diskRef(spec), Contents: s.contents}))
	}
	if !s.made() {
		steps = append(steps, step.MakeFilesystem(filesystem))
	}
	return steps
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
	if err := s.checkDisks(spec); err != nil {
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
	if s.array != nil && !s.array.made() {
		if err := s.array.check(ctx, h); err != nil {
			return false, err
		}
	}
	return s.checkDirectory(ctx, h)
}

// checkDisks looks at each disk, and at the array as if it were one.
func (s *scratch) checkDisks(spec *storagev1.ScratchSpec) error {
	elsewhere := slices.DeleteFunc(slices.Clone(s.table), func(m host.Mount) bool { return m.Target == s.target })
	wipe := !slices.ContainsFunc(scratchDisks(spec), func(d *storagev1.ScratchDisk) bool { return !d.GetWipe() })
	if s.array != nil {
		for i, m := range s.array.members {
			c := diskCheck{ref: m.ref, disk: step.WithoutHolder(m.disk, s.array.found), contents: m.contents, own: s.array.own, wipe: spec.GetDisks()[i].GetWipe()}
			if err := c.check(elsewhere, s.written); err != nil {
				return err
			}
		}
		if s.array.found == nil {
			return nil
		}
	}
	disk := s.disk
	if s.array != nil {
		disk = *s.array.found
	}
	return diskCheck{ref: diskRef(spec), disk: disk, contents: s.contents, own: s.own, wipe: wipe}.check(elsewhere, s.written)
}

// diskCheck is one disk, with what it may hold.
type diskCheck struct {
	ref      *taskv1.DiskRef
	disk     host.Disk
	contents []string
	own      string
	wipe     bool
}

// check refuses a disk that is in use elsewhere, or that holds anything else
// than this scratch and may not be erased.
func (c diskCheck) check(elsewhere []host.Mount, written bool) error {
	name := fmt.Sprintf("disk %s (/dev/%s)", step.DiskName(c.ref), c.disk.Name)
	if c.disk.ReadOnly {
		return unfit("%s can only be read: choose another disk", name)
	}
	if uses := step.DiskUses(c.disk, elsewhere); len(uses) > 0 {
		return unfit("%s is in use, and is not touched: %s: release it, or choose another disk", name, strings.Join(uses, ", "))
	}
	if len(c.contents) == 0 || slices.Equal(c.contents, []string{c.own}) {
		return nil
	}
	holds := strings.Join(c.contents, ", ")
	if written {
		return unfit("%s came back with something else on it, and is not touched: it holds %s, not %s: look at it; to use it all the same, run storage.unmount, then storage.scratch with wipe: true",
			name, holds, c.own)
	}
	if !c.wipe {
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
