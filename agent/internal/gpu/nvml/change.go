//go:build cgo

package nvml

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// change makes one change of one GPU. What is so already is left as it is, so
// that it may be asked for again by someone who does not know whether it was
// made. A change that the driver does not take is an error with NVML's number.
func (l *Library) change(q *gpuv1.ChildChange) (*gpuv1.ChildChanged, error) {
	d, err := l.find(q.GetUuid())
	if err != nil {
		return nil, err
	}
	out := &gpuv1.ChildChanged{}
	switch c := q.GetChange().(type) {
	case *gpuv1.ChildChange_MigMode:
		out.Activation, err = l.setMode(d, c.MigMode.GetOn())
	case *gpuv1.ChildChange_PersistenceMode:
		err = l.setPersistence(d, c.PersistenceMode.GetOn())
	case *gpuv1.ChildChange_CreateGpuInstance:
		err = l.createInstance(d, c.CreateGpuInstance)
	case *gpuv1.ChildChange_DestroyGpuInstance:
		err = l.destroyInstance(d, c.DestroyGpuInstance)
	case *gpuv1.ChildChange_CreateComputeInstance:
		err = l.createCompute(d, c.CreateComputeInstance)
	case *gpuv1.ChildChange_DestroyComputeInstance:
		err = l.destroyCompute(d, c.DestroyComputeInstance)
	}
	return out, err
}

// setMode switches MIG mode. The driver gives two answers: whether it took the
// mode, and whether that is active.
func (l *Library) setMode(d *device, on bool) (int32, error) {
	now, next, ret := l.migMode(d)
	if ret != gonvml.SUCCESS {
		return 0, failed("DeviceGetMigMode", ret)
	}
	if now == on && next == on {
		return 0, nil
	}
	mode := gonvml.DEVICE_MIG_DISABLE
	if on {
		mode = gonvml.DEVICE_MIG_ENABLE
	}
	activation, ret := call(l, "DeviceSetMigMode", func() (gonvml.Return, gonvml.Return) { return l.api.DeviceSetMigMode(d.handle, mode) })
	if ret != gonvml.SUCCESS {
		return 0, failed("DeviceSetMigMode", ret)
	}
	return int32(activation), nil
}

func (l *Library) setPersistence(d *device, on bool) error {
	mode := gonvml.FEATURE_DISABLED
	if on {
		mode = gonvml.FEATURE_ENABLED
	}
	_, ret := call(l, "DeviceSetPersistenceMode", func() (none, gonvml.Return) { return none{}, l.api.DeviceSetPersistenceMode(d.handle, mode) })
	return said("DeviceSetPersistenceMode", ret)
}

// said is the error of a function that has no other answer.
func said(name string, ret gonvml.Return) error {
	if ret == gonvml.SUCCESS {
		return nil
	}
	return failed(name, ret)
}

// profileOf finds a profile by its id.
func (l *Library) profileOf(d *device, id uint32) (gonvml.GpuInstanceProfileInfo, error) {
	last := gonvml.ERROR_NOT_SUPPORTED
	for number := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := l.profile(d, number)
		switch {
		case ret == gonvml.SUCCESS && info.Id == id:
			return info, nil
		case ret == gonvml.SUCCESS, ret == gonvml.ERROR_NOT_SUPPORTED, ret == gonvml.ERROR_INVALID_ARGUMENT: // another one
		default:
			last = ret
		}
	}
	return gonvml.GpuInstanceProfileInfo{}, failed("DeviceGetGpuInstanceProfileInfo", last)
}

// instanceAt finds a GPU instance by its place; nil: there is none.
func (l *Library) instanceAt(d *device, at *gpuv1.MigPlace) (gonvml.GpuInstance, gonvml.GpuInstanceProfileInfo, error) {
	info, err := l.profileOf(d, at.GetProfileId())
	if err != nil {
		return nil, info, err
	}
	all, ret := call(l, "DeviceGetGpuInstances", func() ([]gonvml.GpuInstance, gonvml.Return) { return l.api.DeviceGetGpuInstances(d.handle, &info) })
	if ret != gonvml.SUCCESS {
		return nil, info, failed("DeviceGetGpuInstances", ret)
	}
	for _, gi := range all {
		i, ret := call(l, "GpuInstanceGetInfo", func() (gonvml.GpuInstanceInfo, gonvml.Return) { return l.api.GpuInstanceGetInfo(gi) })
		switch {
		case ret != gonvml.SUCCESS:
			return nil, info, failed("GpuInstanceGetInfo", ret)
		case i.Placement.Start == at.GetStart():
			return gi, info, nil
		}
	}
	return nil, info, nil
}

func (l *Library) createInstance(d *device, at *gpuv1.MigPlace) error {
	gi, info, err := l.instanceAt(d, at)
	if err != nil || gi != nil {
		return err
	}
	places, ret := call(l, "DeviceGetGpuInstancePossiblePlacements", func() ([]gonvml.GpuInstancePlacement, gonvml.Return) {
		return l.api.DeviceGetGpuInstancePossiblePlacements(d.handle, &info)
	})
	if ret != gonvml.SUCCESS {
		return failed("DeviceGetGpuInstancePossiblePlacements", ret)
	}
	for _, place := range places {
		if place.Start != at.GetStart() {
			continue
		}
		_, ret := call(l, "DeviceCreateGpuInstanceWithPlacement", func() (gonvml.GpuInstance, gonvml.Return) {
			return l.api.DeviceCreateGpuInstanceWithPlacement(d.handle, &info, &place)
		})
		return said("DeviceCreateGpuInstanceWithPlacement", ret)
	}
	return failed("DeviceGetGpuInstancePossiblePlacements", gonvml.ERROR_NOT_SUPPORTED) // it names no such place
}

func (l *Library) destroyInstance(d *device, at *gpuv1.MigPlace) error {
	gi, _, err := l.instanceAt(d, at)
	if err != nil || gi == nil {
		return err
	}
	_, ret := call(l, "GpuInstanceDestroy", func() (none, gonvml.Return) { return none{}, l.api.GpuInstanceDestroy(gi) })
	return said("GpuInstanceDestroy", ret)
}

// computeAt finds the profile of a compute instance by its slices, and the
// instance by its place; nil: there is none.
func (l *Library) computeAt(gi gonvml.GpuInstance, at *gpuv1.MigComputePlace) (gonvml.ComputeInstance, gonvml.ComputeInstanceProfileInfo, error) {
	const name = "GpuInstanceGetComputeInstanceProfileInfo"
	last, found := gonvml.ERROR_NOT_SUPPORTED, gonvml.ComputeInstanceProfileInfo{}
	for number := range gonvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		info, ret := call(l, name, func() (gonvml.ComputeInstanceProfileInfo, gonvml.Return) {
			return l.api.GpuInstanceGetComputeInstanceProfileInfo(gi, number, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		})
		if ret != gonvml.SUCCESS && ret != gonvml.ERROR_NOT_SUPPORTED && ret != gonvml.ERROR_INVALID_ARGUMENT {
			last = ret
		}
		if ret != gonvml.SUCCESS || info.SliceCount != at.GetSlices() {
			continue
		}
		ci, err := l.computeOf(gi, info, at)
		if err != nil || ci != nil {
			return ci, info, err
		}
		if found.SliceCount == 0 {
			found = info // the first of these slices is without extras
		}
	}
	if found.SliceCount == 0 {
		return nil, found, failed(name, last)
	}
	return nil, found, nil
}

func (l *Library) computeOf(gi gonvml.GpuInstance, info gonvml.ComputeInstanceProfileInfo, at *gpuv1.MigComputePlace) (gonvml.ComputeInstance, error) {
	all, ret := call(l, "GpuInstanceGetComputeInstances", func() ([]gonvml.ComputeInstance, gonvml.Return) {
		return l.api.GpuInstanceGetComputeInstances(gi, &info)
	})
	if ret != gonvml.SUCCESS {
		return nil, failed("GpuInstanceGetComputeInstances", ret)
	}
	for _, ci := range all {
		i, ret := call(l, "ComputeInstanceGetInfo", func() (gonvml.ComputeInstanceInfo, gonvml.Return) { return l.api.ComputeInstanceGetInfo(ci) })
		switch {
		case ret != gonvml.SUCCESS:
			return nil, failed("ComputeInstanceGetInfo", ret)
		case i.Placement.Start == at.GetStart():
			return ci, nil
		}
	}
	return nil, nil
}

func (l *Library) createCompute(d *device, at *gpuv1.MigComputePlace) error {
	gi, whole, err := l.instanceAt(d, at.GetGpuInstance())
	if err != nil {
		return err
	}
	if gi == nil {
		return failed("DeviceGetGpuInstances", gonvml.ERROR_NOT_FOUND)
	}
	ci, info, err := l.computeAt(gi, at)
	if err != nil || ci != nil {
		return err
	}
	// One that fills its GPU instance has one place. A driver that is too old to
	// be told a place can make no other without choosing itself.
	const placed = "GpuInstanceCreateComputeInstanceWithPlacement"
	const plain = "GpuInstanceCreateComputeInstance"
	if !l.has[placed] && at.GetSlices() == whole.SliceCount {
		_, ret := call(l, plain, func() (gonvml.ComputeInstance, gonvml.Return) {
			return l.api.GpuInstanceCreateComputeInstance(gi, &info)
		})
		return said(plain, ret)
	}
	place := gonvml.ComputeInstancePlacement{Start: at.GetStart(), Size: at.GetSlices()}
	_, ret := call(l, placed, func() (gonvml.ComputeInstance, gonvml.Return) {
		return l.api.GpuInstanceCreateComputeInstanceWithPlacement(gi, &info, &place)
	})
	return said(placed, ret)
}

func (l *Library) destroyCompute(d *device, at *gpuv1.MigComputePlace) error {
	gi, _, err := l.instanceAt(d, at.GetGpuInstance())
	if err != nil || gi == nil {
		return err
	}
	ci, _, err := l.computeAt(gi, at)
	if err != nil || ci == nil {
		return err
	}
	_, ret := call(l, "ComputeInstanceDestroy", func() (none, gonvml.Return) { return none{}, l.api.ComputeInstanceDestroy(ci) })
	return said("ComputeInstanceDestroy", ret)
}
