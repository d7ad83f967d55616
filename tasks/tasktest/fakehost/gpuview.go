package fakehost

import (
	"context"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// changeGPU is change for a method that the script may let fail.
func changeGPU(ctx context.Context, v *view, name, uuid string, f func() error) error {
	return change(ctx, v, name, uuid, func() error {
		if err := v.n.gpuFault(name, uuid); err != nil {
			return err
		}
		return f()
	})
}

func (v *view) GPUs(ctx context.Context) ([]host.GPU, error) {
	return call(ctx, v, Op{Name: "GPUs"}, v.n.gpuList)
}

func (v *view) GPUState(ctx context.Context, uuid string) (host.GPUState, error) {
	return call(ctx, v, Op{Name: "GPUState", Object: uuid}, func() (host.GPUState, error) { return v.n.gpuState(uuid) })
}

func (v *view) GPUHolders(ctx context.Context, uuid string) ([]host.GPUHolder, error) {
	return call(ctx, v, Op{Name: "GPUHolders", Object: uuid}, func() ([]host.GPUHolder, error) { return v.n.gpuHolders(uuid) })
}

func (v *view) CDI(ctx context.Context) (host.CDISpec, error) {
	return call(ctx, v, Op{Name: "CDI"}, func() (host.CDISpec, error) { return v.n.cdi(), nil })
}

func (v *view) ResolveCDI(ctx context.Context, name string) ([]string, error) {
	return call(ctx, v, Op{Name: "ResolveCDI", Object: name}, func() ([]string, error) { return v.n.resolveCDI(name) })
}

func (v *view) SetMIGMode(ctx context.Context, uuid string, on bool) (host.MIGActivation, error) {
	return call(ctx, v, Op{Name: "SetMIGMode", Object: uuid, Change: true}, func() (host.MIGActivation, error) {
		if err := v.n.gpuFault("SetMIGMode", uuid); err != nil {
			return "", err
		}
		return v.n.setMIGMode(uuid, on)
	})
}

func (v *view) CreateGPUInstance(ctx context.Context, uuid string, at host.MIGPlace) error {
	return changeGPU(ctx, v, "CreateGPUInstance", uuid, func() error { return v.n.createGPUInstance(uuid, at) })
}

func (v *view) DestroyGPUInstance(ctx context.Context, uuid string, at host.MIGPlace) error {
	return changeGPU(ctx, v, "DestroyGPUInstance", uuid, func() error { return v.n.destroyGPUInstance(uuid, at) })
}

func (v *view) CreateComputeInstance(ctx context.Context, uuid string, in host.MIGPlace, at host.MIGComputePlace) error {
	return changeGPU(ctx, v, "CreateComputeInstance", uuid, func() error { return v.n.createCompute(uuid, in, at) })
}

func (v *view) DestroyComputeInstance(ctx context.Context, uuid string, in host.MIGPlace, at host.MIGComputePlace) error {
	return changeGPU(ctx, v, "DestroyComputeInstance", uuid, func() error { return v.n.destroyCompute(uuid, in, at) })
}

func (v *view) SetGPUPersistence(ctx context.Context, uuid string, on bool) error {
	return changeGPU(ctx, v, "SetGPUPersistence", uuid, func() error {
		g, err := v.n.gpu("set persistence mode of GPU", uuid)
		if err == nil {
			g.Persistence = on
		}
		return err
	})
}

func (v *view) ResetGPUs(ctx context.Context, uuids []string) error {
	return change(ctx, v, "ResetGPUs", strings.Join(uuids, ","), func() error {
		for _, uuid := range uuids {
			if err := v.n.gpuFault("ResetGPUs", uuid); err != nil {
				return err
			}
		}
		return v.n.resetGPUs(uuids)
	})
}

func (v *view) WriteCDI(ctx context.Context) error {
	return change(ctx, v, "WriteCDI", host.CDIPath, v.n.writeCDI)
}
