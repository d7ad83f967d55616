// Package container has the kinds container.run and container.stop: a container
// that runs on a node through containerd, now and after each boot, and one that
// does not any more.
package container

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	containerv1 "github.com/gpuaas/millwright/proto/millwright/container/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// defaultGrace is how long a program has to end when the spec does not say.
const defaultGrace = 10 * time.Second

// deadline leaves time to read and unpack an image, and to do so again for the
// one that an undo brings back.
const deadline = time.Hour

// Run is the kind container.run.
type Run struct{}

var (
	_ tasks.Task[*containerv1.RunSpec]      = Run{}
	_ tasks.Intender[*containerv1.RunSpec]  = Run{}
	_ tasks.Deadliner[*containerv1.RunSpec] = Run{}
)

// RunInfo describes container.run.
func RunInfo() tasks.Info {
	return tasks.Info{
		Kind: "container.run", Revision: 2, Class: tasks.State, Since: map[protoreflect.Name]uint32{"devices": 2},
		Summary: "run a container, now and after each boot",
	}
}

// Locks implements [tasks.Task]. What a container sees of a mount, and its GPUs,
// must not change while it is started.
func (Run) Locks(s *containerv1.RunSpec) []tasks.Lock {
	locks := []tasks.Lock{{Name: intentKey(s.GetName())}}
	for _, m := range s.GetMounts() {
		l := tasks.Lock{Name: "mount:" + m.GetSource(), Shared: true}
		if !slices.Contains(locks, l) {
			locks = append(locks, l)
		}
	}
	if len(s.GetDevices()) > 0 {
		locks = append(locks, tasks.Lock{Name: "gpu", Shared: true})
	}
	return locks
}

// Intent implements [tasks.Intender].
func (Run) Intent(s *containerv1.RunSpec) (string, tasks.IntentChange) {
	return intentKey(s.GetName()), tasks.IntentSet
}

// Deadline implements [tasks.Deadliner].
func (Run) Deadline(*containerv1.RunSpec) time.Duration { return deadline }

func intentKey(name string) string { return "container:" + name }

// setup returns what the container is made from.
func setup(s *containerv1.RunSpec) *taskv1.ContainerStartStep {
	c := &taskv1.ContainerStartStep{
		Name: s.GetName(), ImageDigest: s.GetImage().GetDigest(), OciArchive: s.GetImage().GetOciArchive(),
		Argv: s.GetArgv(), Environment: s.GetEnvironment(), WorkingDirectory: s.GetWorkingDirectory(), User: s.GetUser(),
		ReadOnlyRoot: s.GetReadOnlyRoot(), HostNetwork: s.GetNetwork() == containerv1.Network_NETWORK_HOST,
		MemoryBytes: s.GetResources().GetMemoryBytes(), CpuMillis: s.GetResources().GetCpuMillis(), StopGrace: s.GetStopGrace(),
		Devices: s.GetDevices(),
	}
	if c.GetStopGrace() == nil {
		c.StopGrace = durationpb.New(defaultGrace)
	}
	for _, m := range s.GetMounts() {
		c.Mounts = append(c.Mounts, &taskv1.ContainerMount{Source: m.GetSource(), Target: m.GetTarget(), ReadOnly: m.GetReadOnly()})
	}
	return c
}

// Plan implements [tasks.Task].
func (Run) Plan(ctx context.Context, h host.Reader, spec *containerv1.RunSpec) (tasks.Plan, error) {
	if err := checkRuntime(ctx, h); err != nil {
		return tasks.Plan{}, err
	}
	st, err := h.Container(ctx, spec.GetName())
	if err != nil {
		return tasks.Plan{}, err
	}
	if st.Exists && !st.Ours {
		return tasks.Plan{}, unfit("container %s in namespace millwright was not made by Millwright: remove it, or choose another name", spec.GetName())
	}
	want := setup(spec)
	diffs, err := differences(st, want)
	if err != nil || len(diffs) == 0 {
		return tasks.Plan{}, err
	}
	image, err := h.Image(ctx, want.GetImageDigest())
	if err != nil {
		return tasks.Plan{}, err
	}
	if err := preflight(ctx, h, want, image.Present); err != nil {
		return tasks.Plan{}, err
	}
	p := tasks.Plan{Differences: diffs}
	if !image.Present {
		p.Differences = append(p.Differences, tasks.Difference{Subject: "image " + want.GetImageDigest(), Want: "in the store"})
		p.Steps = append(p.Steps, step.ImportImage(&taskv1.ImageImportStep{Digest: want.GetImageDigest(), OciArchive: want.GetOciArchive()}))
	}
	p.Steps = append(p.Steps, step.StartContainer(want))
	if old, err := step.ContainerSetup(st.Record); err == nil && old.GetImageDigest() != want.GetImageDigest() {
		last, err := giveUpImage(ctx, h, old)
		if err != nil {
			return tasks.Plan{}, err
		}
		p.Steps = append(p.Steps, last...)
	}
	return p, nil
}

// giveUpImage returns the step that removes the image of a container that goes,
// when no other container uses it.
func giveUpImage(ctx context.Context, h host.Reader, old *taskv1.ContainerStartStep) ([]tasks.Step, error) {
	image, err := h.Image(ctx, old.GetImageDigest())
	if err != nil {
		return nil, err
	}
	others := slices.DeleteFunc(slices.Clone(image.Users), func(u string) bool { return u == old.GetName() })
	if !image.Present || len(others) > 0 {
		return nil, nil
	}
	return []tasks.Step{step.RemoveImage(&taskv1.ImageRemoveStep{Digest: old.GetImageDigest(), OciArchive: old.GetOciArchive()})}, nil
}

// differences names all that is not as want has it.
func differences(st host.ContainerStatus, want *taskv1.ContainerStartStep) ([]tasks.Difference, error) {
	subject := "container " + want.GetName()
	if !st.Exists {
		return []tasks.Difference{{Subject: subject, Want: "running"}}, nil
	}
	var diffs []tasks.Difference
	if !st.Running {
		diffs = append(diffs, tasks.Difference{Subject: subject, Have: step.DescribeContainer(st), Want: "running"})
	}
	record, err := step.ContainerRecord(want)
	if err != nil || bytes.Equal(record, st.Record) {
		return diffs, err
	}
	have, err := step.ContainerSetup(st.Record)
	if err != nil {
		return append(diffs, tasks.Difference{Subject: subject + " spec", Have: "unknown", Want: "as asked for"}), nil //nolint:nilerr // a record that cannot be read is a difference
	}
	fields := want.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if h, w := show(have, fd), show(want, fd); h != w {
			diffs = append(diffs, tasks.Difference{Subject: subject + " " + string(fd.Name()), Have: h, Want: w})
		}
	}
	if len(diffs) == 0 { // a field that this release does not know
		diffs = append(diffs, tasks.Difference{Subject: subject + " spec", Have: "made by another release", Want: "as asked for"})
	}
	return diffs, nil
}

// show renders a field the same way each time.
func show(m proto.Message, fd protoreflect.FieldDescriptor) string {
	r := m.ProtoReflect()
	if !r.Has(fd) {
		return ""
	}
	v := r.Get(fd)
	if !fd.IsList() {
		return showValue(fd, v)
	}
	var parts []string
	for i := range v.List().Len() {
		parts = append(parts, showValue(fd, v.List().Get(i)))
	}
	return strings.Join(parts, " ")
}

func showValue(fd protoreflect.FieldDescriptor, v protoreflect.Value) string {
	if fd.Message() == nil {
		return v.String()
	}
	switch m := v.Message().Interface().(type) {
	case *durationpb.Duration:
		return m.AsDuration().String()
	case *taskv1.ContainerMount:
		if m.GetReadOnly() {
			return m.GetSource() + ":" + m.GetTarget() + ":ro"
		}
		return m.GetSource() + ":" + m.GetTarget()
	default:
		return string(fd.Message().Name())
	}
}

// checkRuntime refuses a node without containerd. One that is only down is
// waited for.
func checkRuntime(ctx context.Context, h host.Reader) error {
	_, err := h.FindProgram(ctx, "containerd")
	if errors.Is(err, fs.ErrNotExist) {
		return unfit("program containerd is missing: install package containerd (1.6 or newer) and runc")
	}
	return err
}

// preflight refuses what the node cannot run.
func preflight(ctx context.Context, h host.Reader, want *taskv1.ContainerStartStep, imported bool) error {
	table, err := h.Mounts(ctx)
	if err != nil {
		return err
	}
	for _, m := range want.GetMounts() {
		if err := checkSource(ctx, h, table, m.GetSource()); err != nil {
			return err
		}
	}
	for i, d := range want.GetDevices() {
		_, err := h.ResolveCDI(ctx, d)
		switch {
		case errors.Is(err, host.ErrGPUUnknown):
			return unfit("devices[%d]: %v: name one that is there, as mig.configure and millctl gpu get tell them", i, err)
		case err != nil:
			return err
		}
	}
	if imported {
		return nil
	}
	archive := want.GetOciArchive()
	if m, bad := step.MayHang(table, archive); bad {
		return unfit("image archive %s lies on %s of type %s, which may stop answering: copy it to a local file system", archive, m.Source, m.FSType)
	}
	digests, err := h.ImageArchive(ctx, archive)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return unfit("image archive %s does not exist: put it there, or name another", archive)
	case errors.Is(err, fs.ErrInvalid):
		return unfit("%v: make it with an OCI layout, for example with skopeo copy or docker buildx --output type=oci", err)
	case err != nil:
		return err
	case !slices.Contains(digests, want.GetImageDigest()):
		return unfit("image archive %s does not hold %s but %s: give the digest of what is to run, or another archive",
			archive, want.GetImageDigest(), strings.Join(digests, ", "))
	}
	return nil
}

// checkSource refuses a mount whose source is missing, as far as a look at it
// cannot hang.
func checkSource(ctx context.Context, h host.Reader, table []host.Mount, source string) error {
	for _, p := range step.Ancestry(source) {
		if _, bad := step.MayHang(table, p); bad {
			return nil
		}
		info, err := h.Lstat(ctx, p)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return unfit("mount source %s does not exist (%s is missing): make it, or name another", source, p)
		case err != nil:
			return err
		case info.Mode&fs.ModeSymlink != 0:
			return unfit("mount source %s: %s is a symbolic link to %s: name the real path", source, p, info.Target)
		}
	}
	return nil
}

// unfit returns an error that refuses the task.
func unfit(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), tasks.ErrPrecondition)
}

// Verify implements [tasks.Task]: the container's first process runs, in its
// control group, by this spec, and goes on running.
func (Run) Verify(ctx context.Context, h host.Prober, spec *containerv1.RunSpec) error {
	return step.VerifyContainer(ctx, h, setup(spec))
}

// Result implements [tasks.Task].
func (Run) Result(ctx context.Context, h host.Prober, spec *containerv1.RunSpec, _ [][]byte) (proto.Message, error) {
	st, err := h.Container(ctx, spec.GetName())
	if err != nil {
		return nil, err
	}
	return &containerv1.RunResult{ImageDigest: st.Image, ControlGroup: st.ControlGroup, Pid: uint32(st.PID)}, nil
}
