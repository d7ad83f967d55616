package gpus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/gpuaas/millwright/agent/internal/crash"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// change has one change made, with nothing of ours on the GPUs.
func (s *Set) change(ctx context.Context, what string, c *gpuv1.ChildChange) (*gpuv1.ChildChanged, error) {
	what = fmt.Sprintf("%s of GPU %s", what, c.GetUuid())
	release, err := s.take(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	defer release()
	if err := s.hush(ctx); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	defer s.quiet.over(linger)
	argv, err := s.argv(&gpuv1.ChildRequest{Ask: &gpuv1.ChildRequest_Change{Change: c}})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	wrote, err := s.cfg.Changes.Change(ctx, what, argv, s.cfg.Environment, s.limit(changeTimeout))
	otherwise := "it ended"
	if err != nil {
		otherwise = err.Error()
	}
	reply, failed := answer(wrote, otherwise)
	if failed != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("%s: the answer was not waited for: %w", what, context.Cause(ctx))
	}
	if failed != nil {
		return nil, fmt.Errorf("%s: %w", what, failed)
	}
	return reply.GetChanged(), nil
}

// hush drops our own holds. A program that the kernel does not let go of holds
// them still.
func (s *Set) hush(ctx context.Context) error {
	err := s.quiet.begin(ctx)
	if err == nil || ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("%w: %w", err, host.ErrGPUUnresponsive)
}

// activations are what NVML says of a mode that it took.
var activations = map[int32]host.MIGActivation{
	0: host.MIGActive, 19: host.MIGWaitsForClients, 16: host.MIGWaitsForReset,
}

// SetMIGMode implements host.MIGWriter. What the driver says of the activation
// besides the three that are known counts as a wait for a reset: the mode is not
// active, and only that is certain.
func (s *Set) SetMIGMode(ctx context.Context, uuid string, on bool) (host.MIGActivation, error) {
	crash.Point("host.mig.mode.before")
	changed, err := s.change(ctx, "set MIG mode", &gpuv1.ChildChange{Uuid: uuid, Change: &gpuv1.ChildChange_MigMode{MigMode: &gpuv1.SetMode{On: on}}})
	if err != nil {
		return "", err
	}
	crash.Point("host.mig.mode.after")
	if a, ok := activations[changed.GetActivation()]; ok {
		return a, nil
	}
	return host.MIGWaitsForReset, nil
}

func place(at host.MIGPlace) *gpuv1.MigPlace {
	return &gpuv1.MigPlace{ProfileId: at.Profile, Start: at.Start}
}

func computePlace(in host.MIGPlace, at host.MIGComputePlace) *gpuv1.MigComputePlace {
	return &gpuv1.MigComputePlace{GpuInstance: place(in), Slices: at.Slices, Start: at.Start}
}

func named(verb string, at host.MIGPlace) string {
	return fmt.Sprintf("%s GPU instance of profile %d at %d", verb, at.Profile, at.Start)
}

func namedCompute(verb string, in host.MIGPlace, at host.MIGComputePlace) string {
	return fmt.Sprintf("%s compute instance of %d slices at %d in %s", verb, at.Slices, at.Start, named("the", in))
}

// CreateGPUInstance implements host.MIGWriter.
func (s *Set) CreateGPUInstance(ctx context.Context, uuid string, at host.MIGPlace) error {
	crash.Point("host.mig.create.before")
	_, err := s.change(ctx, named("create", at), &gpuv1.ChildChange{Uuid: uuid, Change: &gpuv1.ChildChange_CreateGpuInstance{CreateGpuInstance: place(at)}})
	if err == nil {
		crash.Point("host.mig.create.after")
	}
	return err
}

// DestroyGPUInstance implements host.MIGWriter.
func (s *Set) DestroyGPUInstance(ctx context.Context, uuid string, at host.MIGPlace) error {
	crash.Point("host.mig.destroy.before")
	_, err := s.change(ctx, named("destroy", at), &gpuv1.ChildChange{Uuid: uuid, Change: &gpuv1.ChildChange_DestroyGpuInstance{DestroyGpuInstance: place(at)}})
	if err == nil {
		crash.Point("host.mig.destroy.after")
	}
	return err
}

// CreateComputeInstance implements host.MIGWriter.
func (s *Set) CreateComputeInstance(ctx context.Context, uuid string, in host.MIGPlace, at host.MIGComputePlace) error {
	crash.Point("host.mig.compute.create.before")
	_, err := s.change(ctx, namedCompute("create", in, at), &gpuv1.ChildChange{
		Uuid: uuid, Change: &gpuv1.ChildChange_CreateComputeInstance{CreateComputeInstance: computePlace(in, at)},
	})
	if err == nil {
		crash.Point("host.mig.compute.create.after")
	}
	return err
}

// DestroyComputeInstance implements host.MIGWriter.
func (s *Set) DestroyComputeInstance(ctx context.Context, uuid string, in host.MIGPlace, at host.MIGComputePlace) error {
	crash.Point("host.mig.compute.destroy.before")
	_, err := s.change(ctx, namedCompute("destroy", in, at), &gpuv1.ChildChange{
		Uuid: uuid, Change: &gpuv1.ChildChange_DestroyComputeInstance{DestroyComputeInstance: computePlace(in, at)},
	})
	if err == nil {
		crash.Point("host.mig.compute.destroy.after")
	}
	return err
}

// SetGPUPersistence implements host.GPUWriter.
func (s *Set) SetGPUPersistence(ctx context.Context, uuid string, on bool) error {
	crash.Point("host.gpu.persistence.before")
	_, err := s.change(ctx, "set persistence mode", &gpuv1.ChildChange{
		Uuid: uuid, Change: &gpuv1.ChildChange_PersistenceMode{PersistenceMode: &gpuv1.SetMode{On: on}},
	})
	if err == nil {
		crash.Point("host.gpu.persistence.after")
	}
	return err
}

// errReset is a reset that nvidia-smi refused for a reason that is not known here.
var errReset = errors.New("nvidia-smi did not reset it")

// ResetGPUs implements host.GPUWriter. Only the GPUs named are reset: without -i
// nvidia-smi would reset all.
func (s *Set) ResetGPUs(ctx context.Context, uuids []string) error {
	what := "reset GPU " + strings.Join(uuids, ", ")
	if len(uuids) == 0 {
		return nil
	}
	release, err := s.take(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer release()
	program, err := s.cfg.Find(ctx, "nvidia-smi")
	if err != nil {
		return fmt.Errorf("%s: %w: %w", what, err, host.ErrGPUUnsupported)
	}
	if err := s.hush(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer s.quiet.over(linger)
	crash.Point("host.gpu.reset.before")
	argv := []string{program, "--gpu-reset", "-i", strings.Join(uuids, ",")}
	wrote, err := s.cfg.Changes.Change(ctx, what, argv, s.cfg.Environment, s.limit(resetTimeout))
	if err != nil {
		return fmt.Errorf("%s: %w", what, refused(ctx, string(wrote), err))
	}
	crash.Point("host.gpu.reset.after")
	return nil
}

// refused understands what nvidia-smi says, which has no codes for it: 255 is
// all that a GPU in use gives.
func refused(ctx context.Context, said string, err error) error {
	text := strings.Join(strings.Fields(said), " ")
	if text == "" {
		return ended(ctx, err)
	}
	lower := strings.ToLower(text)
	for _, m := range []struct {
		words   string
		meaning error
	}{
		{"in use by", host.ErrGPUInUse}, {"not supported", host.ErrGPUUnsupported}, {"no devices were found", host.ErrGPUUnknown},
		{"not found", host.ErrGPUUnknown}, {"permission", host.ErrGPUPermission}, {"lost", host.ErrGPULost}, {"reset together", host.ErrGPUUnsupported},
		{"communicate with the nvidia driver", host.ErrGPUDriver}, {"version mismatch", host.ErrGPUDriver},
	} {
		if strings.Contains(lower, m.words) {
			return fmt.Errorf("nvidia-smi says %q%s: %w", text, hint(m.meaning), m.meaning)
		}
	}
	return fmt.Errorf("nvidia-smi says %q: %w", text, errReset)
}

// hint names a holder that no process is: a module that has the GPU as a display.
func hint(meaning error) string {
	if !errors.Is(meaning, host.ErrGPUInUse) {
		return ""
	}
	if _, err := os.Stat("/sys/module/nvidia_drm"); err != nil {
		return ""
	}
	return " (the module nvidia_drm is loaded: it holds a GPU while its modeset is on)"
}
