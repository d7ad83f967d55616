package step

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// diskTimeout bounds the making of a file system: a large disk is discarded
// first.
const diskTimeout = 5 * time.Minute

// DiskName names a disk for a person, the same way in each boot.
func DiskName(ref *taskv1.DiskRef) string {
	if len(ref.GetArray()) > 0 {
		var names []string
		for _, d := range ref.GetArray() {
			names = append(names, DiskName(d))
		}
		return strings.Join(names, ", ")
	}
	if ref.GetSerial() != "" {
		return "with serial " + ref.GetSerial()
	}
	return "in file " + ref.GetLoopFile()
}

// diskPhrase is a disk or array in a sentence.
func diskPhrase(ref *taskv1.DiskRef) string {
	if len(ref.GetArray()) > 0 {
		return "the striped array of disks " + DiskName(ref)
	}
	return "disk " + DiskName(ref)
}

// FindDisk returns the one disk that ref names, or the array. Two that look the
// same are an error: neither is touched. So is an array that does not run.
func FindDisk(ctx context.Context, h host.DiskReader, ref *taskv1.DiskRef) (host.Disk, error) {
	if len(ref.GetArray()) > 0 {
		_, array, err := FindArray(ctx, h, ref.GetArray())
		if err != nil {
			return host.Disk{}, err
		}
		if array == nil || !array.Array.Active {
			return host.Disk{}, fmt.Errorf("%s is not assembled: look at /proc/mdstat: %w", diskPhrase(ref), tasks.ErrPrecondition)
		}
		return *array, nil
	}
	disks, err := h.Disks(ctx)
	if err != nil {
		return host.Disk{}, err
	}
	var found []host.Disk
	var names []string
	for _, d := range disks {
		if ref.GetSerial() != "" && d.Serial == ref.GetSerial() || ref.GetLoopFile() != "" && d.File == ref.GetLoopFile() {
			found, names = append(found, d), append(names, "/dev/"+d.Name)
		}
	}
	switch len(found) {
	case 0:
		return host.Disk{}, fmt.Errorf("no disk %s is there: look what lsblk -d -o NAME,SERIAL,SIZE shows: %w", DiskName(ref), tasks.ErrPrecondition)
	case 1:
		return found[0], nil
	default:
		return host.Disk{}, fmt.Errorf("%s are all disk %s: Millwright cannot tell them apart and touches none: %w",
			strings.Join(names, ", "), DiskName(ref), tasks.ErrPrecondition)
	}
}

// DiskUses names all that uses a disk or a part of it now.
func DiskUses(d host.Disk, table []host.Mount) []string {
	var uses []string
	devs, sources := []string{d.Dev}, []string{"/dev/" + d.Name}
	for _, p := range d.Partitions {
		devs, sources = append(devs, p.Dev), append(sources, "/dev/"+p.Name)
	}
	for _, m := range table {
		if slices.Contains(devs, m.Dev) || slices.Contains(sources, m.Source) {
			uses = append(uses, "it is mounted on "+m.Target)
		}
	}
	for _, name := range d.Holders {
		uses = append(uses, "device "+name+" stands on it")
	}
	if d.Swap {
		uses = append(uses, "the node swaps to it")
	}
	return uses
}

// DiskContents names what a disk is seen to hold, sorted.
func DiskContents(ctx context.Context, h host.DiskReader, d host.Disk) ([]string, error) {
	signatures, err := h.Signatures(ctx, d.Name)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, s := range signatures {
		out = append(out, Content(s.Type, s.UUID))
	}
	for _, p := range d.Partitions {
		out = append(out, "partition "+p.Name)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// Content names one thing that a disk holds.
func Content(kind, uuid string) string { return strings.TrimSpace(kind + " " + uuid) }

// freeDisk finds a disk that a step may write to: nothing uses it, and it holds
// nothing but what is expected.
func freeDisk(ctx context.Context, h host.Reader, ref *taskv1.DiskRef, expected []string) (host.Disk, []string, error) {
	d, err := FindDisk(ctx, h, ref)
	if err != nil {
		return d, nil, err
	}
	table, err := h.Mounts(ctx)
	if err != nil {
		return d, nil, err
	}
	if uses := DiskUses(d, table); len(uses) > 0 {
		return d, nil, &tasks.ReasonError{Reason: tasks.ReasonBusy, Err: fmt.Errorf("disk %s (/dev/%s): %s: %w",
			DiskName(ref), d.Name, strings.Join(uses, ", "), host.ErrBusy)}
	}
	contents, err := DiskContents(ctx, h, d)
	if err != nil {
		return d, nil, err
	}
	for _, c := range contents {
		if !slices.Contains(expected, c) {
			return d, nil, fmt.Errorf("disk %s (/dev/%s) holds %s meanwhile, which was not there when this was planned", DiskName(ref), d.Name, c)
		}
	}
	return d, contents, nil
}

func observeDisk(ctx context.Context, h host.Reader, ref *taskv1.DiskRef) ([]byte, error) {
	d, err := FindDisk(ctx, h, ref)
	if err != nil {
		return nil, err
	}
	contents, err := DiskContents(ctx, h, d)
	if err != nil {
		return nil, err
	}
	return encode(&taskv1.DiskObserved{Contents: contents})
}

type wipeDisk struct{ args *taskv1.DiskWipeStep }

// WipeDisk returns the step that erases what a disk holds, as far as its
// arguments name it. It has no undo.
func WipeDisk(args *taskv1.DiskWipeStep) tasks.Step { return wipeDisk{args} }

func (s wipeDisk) Args() proto.Message    { return s.args }
func (s wipeDisk) Timeout() time.Duration { return diskTimeout }

func (s wipeDisk) Title() string {
	return fmt.Sprintf("ERASE disk %s, which holds %s", DiskName(s.args.GetDisk()), strings.Join(s.args.GetContents(), ", "))
}

func (s wipeDisk) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observeDisk(ctx, h, s.args.GetDisk())
}

func (s wipeDisk) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	d, contents, err := freeDisk(ctx, h, s.args.GetDisk(), s.args.GetContents())
	if err != nil || len(contents) == 0 {
		return nil, err
	}
	return nil, h.WipeDisk(ctx, d.Name)
}

func (s wipeDisk) Verify(ctx context.Context, h host.Prober) error {
	return holds(ctx, h, s.args.GetDisk())
}

func (s wipeDisk) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was taskv1.DiskObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	d, err := FindDisk(ctx, h, s.args.GetDisk())
	if err != nil {
		return err
	}
	contents, err := DiskContents(ctx, h, d)
	if err != nil {
		return err
	}
	if slices.Equal(contents, was.GetContents()) {
		return nil
	}
	return fmt.Errorf("disk %s was erased: %w", DiskName(s.args.GetDisk()), tasks.ErrIrreversible)
}

// holds reports whether a disk holds exactly what is named.
func holds(ctx context.Context, h host.Reader, ref *taskv1.DiskRef, want ...string) error {
	d, err := FindDisk(ctx, h, ref)
	if err != nil {
		return err
	}
	contents, err := DiskContents(ctx, h, d)
	if err != nil {
		return err
	}
	if !slices.Equal(contents, want) {
		return fmt.Errorf("disk %s (/dev/%s) holds %q, not %q: %w", DiskName(ref), d.Name, contents, want, tasks.ErrNotSatisfied)
	}
	return nil
}

type makeFilesystem struct{ args *taskv1.FilesystemMakeStep }

// MakeFilesystem returns the step that makes a file system on an empty disk. Its
// UUID is decided with the plan: after a crash, what has that UUID and is not
// mounted is this step's own work, perhaps half done, and is made again. Its
// undo erases only that.
func MakeFilesystem(args *taskv1.FilesystemMakeStep) tasks.Step { return makeFilesystem{args} }

func (s makeFilesystem) Args() proto.Message    { return s.args }
func (s makeFilesystem) Timeout() time.Duration { return diskTimeout }
func (s makeFilesystem) own() string            { return Content(s.args.GetFstype(), s.args.GetUuid()) }

func (s makeFilesystem) Title() string {
	state := "which is empty"
	if s.args.GetKeep() {
		state = "unless it is there"
	}
	return fmt.Sprintf("make %s on %s, %s", s.args.GetFstype(), diskPhrase(s.args.GetDisk()), state)
}

func (s makeFilesystem) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observeDisk(ctx, h, s.args.GetDisk())
}

func (s makeFilesystem) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	d, contents, err := freeDisk(ctx, h, s.args.GetDisk(), []string{s.own()})
	if err != nil || s.args.GetKeep() && len(contents) > 0 {
		return nil, err
	}
	return nil, h.MakeFilesystem(ctx, d.Name, host.Filesystem{Type: s.args.GetFstype(), UUID: s.args.GetUuid(), Label: s.args.GetLabel()})
}

func (s makeFilesystem) Verify(ctx context.Context, h host.Prober) error {
	return holds(ctx, h, s.args.GetDisk(), s.own())
}

func (s makeFilesystem) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was taskv1.DiskObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	if slices.Contains(was.GetContents(), s.own()) {
		return nil
	}
	d, contents, err := freeDisk(ctx, h, s.args.GetDisk(), append(was.GetContents(), s.own()))
	if err != nil || !slices.Contains(contents, s.own()) {
		return err
	}
	return h.WipeDisk(ctx, d.Name)
}
