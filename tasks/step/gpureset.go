package step

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

type persistGPU struct{ args *gpuv1.GpuPersistenceStep }

// PersistGPU returns the step that switches a GPU's persistence mode, which holds
// the GPU like a program does.
func PersistGPU(args *gpuv1.GpuPersistenceStep) tasks.Step { return persistGPU{args} }

func (s persistGPU) Args() proto.Message { return s.args }

func (s persistGPU) Title() string {
	return fmt.Sprintf("switch persistence mode of %s %s", s.args.GetGpu().GetName(), onOff(s.args.GetOn()))
}

func (s persistGPU) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	st, err := h.GPUState(ctx, s.args.GetGpu().GetUuid())
	if err != nil {
		return nil, gpuError(s.args.GetGpu().GetName(), err)
	}
	return encode(&gpuv1.GpuPersistenceObserved{On: st.Persistence})
}

func (s persistGPU) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	return nil, s.set(ctx, h, s.args.GetOn())
}

func (s persistGPU) set(ctx context.Context, h host.Host, on bool) error {
	return gpuError(s.args.GetGpu().GetName(), h.SetGPUPersistence(ctx, s.args.GetGpu().GetUuid(), on))
}

func (s persistGPU) Verify(ctx context.Context, h host.Prober) error {
	st, err := h.GPUState(ctx, s.args.GetGpu().GetUuid())
	if err == nil && st.Persistence != s.args.GetOn() {
		err = fmt.Errorf("persistence mode is %s: %w", onOff(st.Persistence), tasks.ErrNotSatisfied)
	}
	return gpuError(s.args.GetGpu().GetName(), err)
}

func (s persistGPU) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was gpuv1.GpuPersistenceObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	return s.set(ctx, h, was.GetOn())
}

// resetGrace is how much longer than nvidia-smi the step may take.
const resetGrace = 3 * time.Minute

type resetGPU struct{ args *gpuv1.GpuResetStep }

var _ tasks.Limiter = resetGPU{}

// ResetGPU returns the step that has nvidia-smi reset GPUs, once: what runs is
// found again after a crash, and what was started and has no known end is never
// started again. In another boot than the one that is named the boot has reset
// them, and nvidia-smi is not run.
func ResetGPU(args *gpuv1.GpuResetStep) tasks.Step { return resetGPU{args} }

func (s resetGPU) Args() proto.Message { return s.args }

// Timeout implements [tasks.Limiter].
func (s resetGPU) Timeout() time.Duration { return s.args.GetTimeout().AsDuration() + resetGrace }

func (s resetGPU) Title() string { return "reset " + targetNames(s.args.GetGpus()) }

func targetNames(list []*gpuv1.GpuTarget) string {
	var out []string
	for _, g := range list {
		out = append(out, g.GetName())
	}
	return strings.Join(out, ", ")
}

// Observe returns nothing: a reset cannot be undone, and what it takes with it
// has steps of its own.
func (s resetGPU) Observe(context.Context, host.Reader) ([]byte, error) { return nil, nil }

func (s resetGPU) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	// Also when it is to stop: what was begun is told all the same.
	boot, err := h.BootID(context.WithoutCancel(ctx))
	if err != nil {
		return nil, fmt.Errorf("read boot id: %w", err)
	}
	if boot != s.args.GetBootId() {
		return encode(&gpuv1.GpuResetOutcome{By: gpuv1.ResetBy_RESET_BY_BOOT, Gpus: s.args.GetGpus()})
	}
	var uuids []string
	for _, g := range s.args.GetGpus() {
		uuids = append(uuids, g.GetUuid())
	}
	r, err := h.ResetGPUsOnce(ctx, uuids, s.args.GetTimeout().AsDuration())
	if err != nil {
		return nil, s.failed(ctx, h, r, err)
	}
	return encode(&gpuv1.GpuResetOutcome{By: gpuv1.ResetBy_RESET_BY_COMMAND, Said: r.Said, Gpus: s.args.GetGpus()})
}

// failed says what an error of the reset means. nvidia-smi that said no before it
// has reset any has changed nothing.
func (s resetGPU) failed(ctx context.Context, h host.Host, r host.GPUReset, err error) error {
	name := targetNames(s.args.GetGpus())
	out := &tasks.ReasonError{Reason: tasks.ReasonGPUReset, Err: fmt.Errorf("%s: %w", name, err)}
	switch {
	case errors.Is(err, host.ErrOutcomeUnknown):
		return err
	case errors.Is(err, host.ErrNotStarted):
		out.Unchanged = true
		return out
	case errors.Is(err, host.ErrGPUInUse):
		out.Reason, out.Unchanged = tasks.ReasonGPUInUse, !r.Some
		out.Err = fmt.Errorf("%s: %s: end them, or wait: %w", name, s.holders(ctx, h), err)
	case errors.Is(err, host.ErrGPUUnsupported):
		out.Unchanged = !r.Some
		out.Err = fmt.Errorf("%s cannot be reset here, or not alone: name all GPUs that NVLink joins, or reboot the node (system.reboot): %w", name, err)
	case errors.Is(err, host.ErrGPULost), errors.Is(err, host.ErrGPUUnknown):
		out.Reason = tasks.ReasonGPULost
	case errors.Is(err, host.ErrGPUUnresponsive), errors.Is(err, host.ErrGPUDriver), errors.Is(err, host.ErrGPUPermission):
		out.Reason = tasks.ReasonGPUDriver
	}
	if r.Said != "" || r.ExitCode != 0 || r.Signal != 0 || r.TimedOut {
		out.Command = outcomeProto(r.Outcome)
	}
	return out
}

// holders names who holds the GPUs.
func (s resetGPU) holders(ctx context.Context, h host.Reader) string {
	var parts []string
	for _, g := range s.args.GetGpus() {
		list, err := h.GPUHolders(ctx, g.GetUuid())
		switch {
		case err != nil:
			parts = append(parts, fmt.Sprintf("who holds %s is not known: %v", g.GetName(), err))
		case len(list) > 0:
			parts = append(parts, fmt.Sprintf("%s is held by %s", g.GetName(), GPUHolders(list)))
		}
	}
	if len(parts) == 0 {
		return "no process is seen that holds it; a display, or a monitor's leaked handle, can"
	}
	return strings.Join(parts, "; ")
}

// Verify reads the GPUs again: they answer, what a reset takes is gone, and the
// driver asks for nothing more.
func (s resetGPU) Verify(ctx context.Context, h host.Prober) error {
	boot, err := h.BootID(ctx)
	if err != nil {
		return fmt.Errorf("read boot id: %w", err)
	}
	for _, g := range s.args.GetGpus() {
		st, err := h.GPUState(ctx, g.GetUuid())
		if err != nil {
			return gpuError(g.GetName(), err)
		}
		if boot == s.args.GetBootId() && g.GetInstances() > 0 && len(st.Instances) > 0 {
			return reasonError(tasks.ReasonGPUReset, "nvidia-smi said that %s was reset, and its MIG instances still stand: it was not: reboot the node (system.reboot): %w",
				g.GetName(), tasks.ErrNotSatisfied)
		}
		if err := Recovered(g.GetName(), st.Recovery, host.GPURecovery(g.GetRecovery())); err != nil {
			return err
		}
	}
	return nil
}

// Recovered returns nil when the driver asks for nothing more of a GPU that was
// reset, and else what to do. A driver that never said it cannot be asked.
func Recovered(name string, now, before host.GPURecovery) error {
	way := ""
	switch now {
	case host.GPURecoveryNone:
		return nil
	case host.GPURecoveryUnknown:
		if before == host.GPURecoveryUnknown {
			return nil
		}
		return fmt.Errorf("%s: the driver does not say whether it is well: %w", name, tasks.ErrNotSatisfied)
	case host.GPURecoveryReset, host.GPURecoveryDrainAndReset, host.GPURecoveryReboot:
		way = "reboot the node (system.reboot)"
	case host.GPURecoveryDrain:
		way = "end the work on the GPUs that NVLink joins with it, or reboot the node (system.reboot)"
	default:
		way = "see millctl gpu get what that is; the node may have to be rebooted (system.reboot)"
	}
	return reasonError(tasks.ReasonGPURecovery, "%s was reset, and the driver asks for more, %s: %s: %w", name, now, way, tasks.ErrNotSatisfied)
}

// Undo returns [tasks.ErrIrreversible].
func (s resetGPU) Undo(context.Context, host.Host, []byte) error {
	return fmt.Errorf("reset %s: %w", targetNames(s.args.GetGpus()), tasks.ErrIrreversible)
}
