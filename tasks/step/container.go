package step

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// containerTime is what making, starting and watching a container may take
// besides its stop grace.
const containerTime = 5 * time.Minute

type startContainer struct{ args *taskv1.ContainerStartStep }

// StartContainer returns the step that makes a container and starts it, in the
// place of what is there under its name. Its undo brings back, from what was
// recorded of it, the container that was there; what that had written outside
// its mounts is gone. It never touches a container that Millwright did not make.
func StartContainer(args *taskv1.ContainerStartStep) tasks.Step { return startContainer{args} }

func (s startContainer) Args() proto.Message { return s.args }

func (s startContainer) Title() string {
	return fmt.Sprintf("start container %s from image %s", s.args.GetName(), short(s.args.GetImageDigest()))
}

// Timeout implements [tasks.Limiter].
func (s startContainer) Timeout() time.Duration { return containerTime + MaxStopGrace + importTime }

// MaxStopGrace is the longest that a container may take to stop.
const MaxStopGrace = 10 * time.Minute

func (s startContainer) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observeContainer(ctx, h, s.args.GetName())
}

func observeContainer(ctx context.Context, h host.Reader, name string) ([]byte, error) {
	st, err := h.Container(ctx, name)
	if err != nil {
		return nil, err
	}
	if st.Exists && !st.Ours {
		return nil, fmt.Errorf("container %s: %w", name, host.ErrNotOurs)
	}
	o := &taskv1.ContainerObserved{Exists: st.Exists, Running: st.Running}
	if setup, err := ContainerSetup(st.Record); err == nil {
		o.Setup = setup
	}
	return encode(o)
}

// ContainerSetup decodes what is kept with a container.
func ContainerSetup(record []byte) (*taskv1.ContainerStartStep, error) {
	if len(record) == 0 {
		return nil, errors.New("nothing is recorded of the container")
	}
	m := &taskv1.ContainerStartStep{}
	return m, decode(record, m)
}

// ContainerRecord encodes what is kept with a container.
func ContainerRecord(setup *taskv1.ContainerStartStep) ([]byte, error) { return encode(setup) }

func (s startContainer) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	record, err := ContainerRecord(s.args)
	if err != nil {
		return nil, err
	}
	st, err := h.Container(ctx, s.args.GetName())
	if err != nil {
		return nil, err
	}
	if !st.Running || !bytes.Equal(st.Record, record) {
		if err := makeContainer(ctx, h, s.args, record); err != nil {
			return nil, err
		}
		if err := h.StartContainer(ctx, s.args.GetName()); err != nil {
			return nil, err
		}
	}
	// A container that ends at once fails here, while its end can be told.
	if st, err = h.Container(ctx, s.args.GetName()); err != nil {
		return nil, err
	}
	if !st.Running {
		return nil, &tasks.ReasonError{Reason: tasks.ReasonContainerEnded, Err: fmt.Errorf("container %s %s", s.args.GetName(), DescribeContainer(st))}
	}
	return nil, nil
}

// makeContainer makes a container in the place of what is there.
func makeContainer(ctx context.Context, h host.Host, setup *taskv1.ContainerStartStep, record []byte) error {
	if err := h.RemoveContainer(ctx, setup.GetName()); err != nil {
		return err
	}
	// It is there, unless its last user gave it up since the step before.
	if err := h.ImportImage(ctx, setup.GetOciArchive(), setup.GetImageDigest()); err != nil {
		return err
	}
	c := host.Container{
		Name: setup.GetName(), Image: setup.GetImageDigest(), Argv: setup.GetArgv(), Environment: setup.GetEnvironment(),
		Dir: setup.GetWorkingDirectory(), User: setup.GetUser(), ReadOnlyRoot: setup.GetReadOnlyRoot(),
		HostNetwork: setup.GetHostNetwork(), MemoryBytes: setup.GetMemoryBytes(), CPUMillis: setup.GetCpuMillis(),
		StopGrace: setup.GetStopGrace().AsDuration(), Record: record, Devices: setup.GetDevices(),
	}
	for _, m := range setup.GetMounts() {
		c.Mounts = append(c.Mounts, host.ContainerMount{Source: m.GetSource(), Target: m.GetTarget(), ReadOnly: m.GetReadOnly()})
	}
	return h.CreateContainer(ctx, c)
}

func (s startContainer) Verify(ctx context.Context, h host.Prober) error {
	return VerifyContainer(ctx, h, s.args)
}

// VerifyContainer returns nil when the container runs as setup says, and goes on
// running for a moment.
func VerifyContainer(ctx context.Context, h host.Prober, setup *taskv1.ContainerStartStep) error {
	record, err := ContainerRecord(setup)
	if err != nil {
		return err
	}
	st, err := h.ProbeContainer(ctx, setup.GetName())
	switch {
	case err != nil:
		return err
	case !st.Running:
		err := fmt.Errorf("container %s %s: %w", setup.GetName(), DescribeContainer(st), tasks.ErrNotSatisfied)
		if st.State == "stopped" {
			return &tasks.ReasonError{Reason: tasks.ReasonContainerEnded, Err: err}
		}
		return err
	case !bytes.Equal(st.Record, record):
		return fmt.Errorf("container %s runs by another spec: %w", setup.GetName(), tasks.ErrNotSatisfied)
	}
	return nil
}

// DescribeContainer says what a container does, or how it ended.
func DescribeContainer(st host.ContainerStatus) string {
	var s string
	switch {
	case !st.Exists:
		return "is not there"
	case st.Running:
		return "runs"
	case st.State == "":
		return "was not started since the node booted"
	case st.State != "stopped":
		return "is " + st.State
	case st.OOMKilled:
		s = "was killed because memory ran out"
	case st.ExitCode > 128 && st.ExitCode <= 128+64:
		s = fmt.Sprintf("ended with exit code %d, as signal %d makes it", st.ExitCode, st.ExitCode-128)
	default:
		s = fmt.Sprintf("ended with exit code %d", st.ExitCode)
	}
	if len(st.LastLines) > 0 {
		s += "; it wrote last: " + strings.Join(st.LastLines, " | ")
	}
	return s
}

func (s startContainer) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was taskv1.ContainerObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	return restoreContainer(ctx, h, s.args.GetName(), &was)
}

// restoreContainer brings back what was observed.
func restoreContainer(ctx context.Context, h host.Host, name string, was *taskv1.ContainerObserved) error {
	if !was.GetExists() {
		return h.RemoveContainer(ctx, name)
	}
	if was.GetSetup() == nil {
		return fmt.Errorf("bring container %s back: what it was made from is not recorded: %w", name, tasks.ErrIrreversible)
	}
	record, err := ContainerRecord(was.GetSetup())
	if err != nil {
		return err
	}
	st, err := h.Container(ctx, name)
	if err != nil {
		return err
	}
	if st.Exists && st.Running == was.GetRunning() && bytes.Equal(st.Record, record) {
		return nil
	}
	if err := makeContainer(ctx, h, was.GetSetup(), record); errors.Is(err, fs.ErrNotExist) || errors.Is(err, host.ErrGPUUnknown) {
		return fmt.Errorf("bring container %s back: %w: %w", name, err, tasks.ErrIrreversible)
	} else if err != nil {
		return err
	}
	if !was.GetRunning() {
		return nil
	}
	return h.StartContainer(ctx, name)
}

type removeContainer struct {
	args *taskv1.ContainerRemoveStep
}

// RemoveContainer returns the step that stops a container and removes it with
// all that it wrote outside its mounts. Its undo makes and starts it again from
// what was recorded of it.
func RemoveContainer(args *taskv1.ContainerRemoveStep) tasks.Step { return removeContainer{args} }

func (s removeContainer) Args() proto.Message { return s.args }

func (s removeContainer) Title() string { return "stop and remove container " + s.args.GetName() }

// Timeout implements [tasks.Limiter].
func (s removeContainer) Timeout() time.Duration { return containerTime + MaxStopGrace }

func (s removeContainer) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observeContainer(ctx, h, s.args.GetName())
}

func (s removeContainer) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	return nil, h.RemoveContainer(ctx, s.args.GetName())
}

func (s removeContainer) Verify(ctx context.Context, h host.Prober) error {
	st, err := h.Container(ctx, s.args.GetName())
	if err != nil {
		return err
	}
	if st.Exists {
		return fmt.Errorf("container %s %s: %w", s.args.GetName(), DescribeContainer(st), tasks.ErrNotSatisfied)
	}
	return nil
}

func (s removeContainer) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was taskv1.ContainerObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	return restoreContainer(ctx, h, s.args.GetName(), &was)
}
