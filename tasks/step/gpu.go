package step

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

type quiesceGPU struct{ args *migv1.GpuQuiesceStep }

var _ tasks.Waiter = quiesceGPU{}

// QuiesceGPU returns the step that waits until no process holds the GPUs. It
// ends none: who holds a GPU is named while it is waited for.
func QuiesceGPU(args *migv1.GpuQuiesceStep) tasks.Step { return quiesceGPU{args} }

func (s quiesceGPU) Args() proto.Message { return s.args }

// WaitMost implements [tasks.Waiter].
func (s quiesceGPU) WaitMost() time.Duration { return s.args.GetWait().AsDuration() }

func (s quiesceGPU) Title() string {
	return fmt.Sprintf("wait %v at most until no process holds %s", s.args.GetWait().AsDuration(), strings.Join(s.args.GetGpus(), ", "))
}

// Observe returns nothing: there is nothing to undo.
func (s quiesceGPU) Observe(context.Context, host.Reader) ([]byte, error) { return nil, nil }

func (s quiesceGPU) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	if err := s.check(ctx, h); err != nil {
		return nil, err
	}
	return nil, nil
}

func (s quiesceGPU) check(ctx context.Context, h host.Reader) error {
	for _, uuid := range s.args.GetGpus() {
		holders, err := h.GPUHolders(ctx, uuid)
		if err != nil {
			return gpuError(uuid, err)
		}
		if len(holders) > 0 {
			return tasks.Wait(reasonError(tasks.ReasonGPUInUse, "%s is held by %s: end them, or wait: %w", uuid, GPUHolders(holders), host.ErrGPUInUse))
		}
	}
	return nil
}

// Verify returns nil: a process that came since is found by what follows.
func (s quiesceGPU) Verify(context.Context, host.Prober) error { return nil }

// Undo does nothing.
func (s quiesceGPU) Undo(context.Context, host.Host, []byte) error { return nil }

type publishGPU struct{ args *migv1.GpuPublishStep }

// PublishGPU returns the step that makes the device nodes of what is on the GPUs
// and writes the CDI specification. One stands before the changes, for its undo,
// and one after them.
func PublishGPU(args *migv1.GpuPublishStep) tasks.Step { return publishGPU{args} }

func (s publishGPU) Args() proto.Message { return s.args }

func (s publishGPU) before() bool {
	return s.args.GetPhase() == migv1.PublishPhase_PUBLISH_PHASE_BEFORE
}

func (s publishGPU) Title() string {
	if s.before() {
		return "write the CDI specification again, if this is undone"
	}
	return "make the device nodes and write the CDI specification"
}

// Observe returns nothing: the specification follows from the GPUs.
func (s publishGPU) Observe(context.Context, host.Reader) ([]byte, error) { return nil, nil }

func (s publishGPU) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	if s.before() {
		return nil, nil
	}
	return nil, gpuError("the CDI specification", h.WriteCDI(ctx))
}

func (s publishGPU) Verify(ctx context.Context, h host.Prober) error {
	if s.before() {
		return nil
	}
	return CheckCDI(ctx, h, s.args.GetVerifies())
}

// CheckCDI returns nil when the CDI specification has what is on the GPUs that are
// named, or on all where none is. What is on others may be under way: the task that
// changes these writes it again.
func CheckCDI(ctx context.Context, h host.Reader, uuids []string) error {
	spec, err := h.CDI(ctx)
	if err != nil || spec.Current {
		return err
	}
	stale := func(uuid string) bool { return slices.Contains(spec.Stale, uuid) }
	if len(uuids) == 0 || slices.ContainsFunc(uuids, stale) {
		return fmt.Errorf("the CDI specification does not have what is on the GPUs: %w", tasks.ErrNotSatisfied)
	}
	return nil
}

// Undo writes the specification of what is there, also when a GPU could not be
// brought back: the others are.
func (s publishGPU) Undo(ctx context.Context, h host.Host, _ []byte) error {
	err := bringAllBack(ctx, h, s.args.GetGpus())
	return errors.Join(err, gpuError("the CDI specification", h.WriteCDI(ctx)))
}
