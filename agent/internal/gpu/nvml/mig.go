//go:build cgo

package nvml

import (
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// mig reads the mode and, while it is on, the layout.
func (l *Library) mig(r *reading, d *device, g *gpuv1.Gpu) {
	now, next, ret := l.migMode(d)
	put(r, "mig_enabled", &g.MigEnabled, now, "DeviceGetMigMode", ret)
	put(r, "mig_pending", &g.MigPending, next, "DeviceGetMigMode", ret)
	values := []gonvml.FieldValue{{FieldId: gonvml.FI_DEV_IS_RESETLESS_MIG_SUPPORTED}}
	ret = l.fields(d, values)
	put(r, "mig_resetless", &g.MigResetless, number(values[0]) != 0, "DeviceGetFieldValues", ret)
	if !now {
		return
	}
	devices := l.migDevices(d)
	for profile := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := call(l, "DeviceGetGpuInstanceProfileInfo", func() (gonvml.GpuInstanceProfileInfo, gonvml.Return) {
			return l.api.DeviceGetGpuInstanceProfileInfo(d.handle, profile)
		})
		switch ret {
		case gonvml.SUCCESS:
			l.instancesOf(r, d, g, profile, info, devices)
		case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_INVALID_ARGUMENT: // not a profile of this GPU
		default:
			r.miss("gpu_instances", "DeviceGetGpuInstanceProfileInfo", ret)
			return
		}
	}
}

func (l *Library) migMode(d *device) (now, next bool, ret gonvml.Return) {
	type mode struct{ now, next bool }
	m, ret := call(l, "DeviceGetMigMode", func() (mode, gonvml.Return) {
		now, next, ret := l.api.DeviceGetMigMode(d.handle)
		return mode{now == gonvml.DEVICE_MIG_ENABLE, next == gonvml.DEVICE_MIG_ENABLE}, ret
	})
	return m.now, m.next, ret
}

// instancesOf adds the GPU instances of one profile.
func (l *Library) instancesOf(r *reading, d *device, g *gpuv1.Gpu, profile int, info gonvml.GpuInstanceProfileInfo, devices map[[2]int]migDevice) {
	instances, ret := call(l, "DeviceGetGpuInstances", func() ([]gonvml.GpuInstance, gonvml.Return) { return l.api.DeviceGetGpuInstances(d.handle, &info) })
	if ret != gonvml.SUCCESS {
		r.miss("gpu_instances", "DeviceGetGpuInstances", ret)
		return
	}
	for _, gi := range instances {
		i, ret := call(l, "GpuInstanceGetInfo", func() (gonvml.GpuInstanceInfo, gonvml.Return) { return l.api.GpuInstanceGetInfo(gi) })
		if ret != gonvml.SUCCESS {
			r.miss("gpu_instances", "GpuInstanceGetInfo", ret)
			continue
		}
		of := &reading{l: l}
		out := &gpuv1.GpuInstance{Id: i.Id, ProfileId: i.ProfileId, Placement: &gpuv1.Placement{Start: i.Placement.Start, Size: i.Placement.Size}}
		get(of, "profile", &out.Profile, "DeviceGetGpuInstanceProfileInfoV", func() (string, gonvml.Return) {
			v2, ret := l.api.DeviceGetGpuInstanceProfileInfoV(d.handle, profile).V2()
			return strings.TrimPrefix(text(v2.Name[:]), "MIG "), ret
		})
		l.computes(of, gi, out, devices)
		out.Unknown = of.unknown
		g.GpuInstances = append(g.GpuInstances, out)
	}
}

// computes adds the compute instances of a GPU instance.
func (l *Library) computes(r *reading, gi gonvml.GpuInstance, out *gpuv1.GpuInstance, devices map[[2]int]migDevice) {
	for profile := range gonvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		info, ret := call(l, "GpuInstanceGetComputeInstanceProfileInfo", func() (gonvml.ComputeInstanceProfileInfo, gonvml.Return) {
			return l.api.GpuInstanceGetComputeInstanceProfileInfo(gi, profile, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		})
		if ret == gonvml.ERROR_NOT_SUPPORTED || ret == gonvml.ERROR_INVALID_ARGUMENT {
			continue // not a profile of this instance
		}
		var found []gonvml.ComputeInstance
		name := "GpuInstanceGetComputeInstanceProfileInfo"
		if ret == gonvml.SUCCESS {
			name = "GpuInstanceGetComputeInstances"
			found, ret = call(l, "GpuInstanceGetComputeInstances", func() ([]gonvml.ComputeInstance, gonvml.Return) {
				return l.api.GpuInstanceGetComputeInstances(gi, &info)
			})
		}
		if ret != gonvml.SUCCESS {
			r.miss("compute_instances", name, ret)
			return
		}
		for _, ci := range found {
			i, ret := call(l, "ComputeInstanceGetInfo", func() (gonvml.ComputeInstanceInfo, gonvml.Return) { return l.api.ComputeInstanceGetInfo(ci) })
			if ret != gonvml.SUCCESS {
				r.miss("compute_instances", "ComputeInstanceGetInfo", ret)
				continue
			}
			of, c := &reading{l: l}, &gpuv1.ComputeInstance{Id: i.Id, ProfileId: i.ProfileId, Placement: &gpuv1.Placement{Start: i.Placement.Start, Size: i.Placement.Size}}
			m, ok := devices[[2]int{int(out.GetId()), int(i.Id)}]
			if !ok {
				m.ret, m.named = gonvml.ERROR_NOT_FOUND, gonvml.ERROR_NOT_FOUND
			}
			put(of, "uuid", &c.Uuid, m.uuid, "DeviceGetUUID", m.ret)
			put(of, "name", &c.Name, m.name, "DeviceGetName", m.named)
			c.Unknown = of.unknown
			out.ComputeInstances = append(out.ComputeInstances, c)
		}
	}
}

// migDevice is what a MIG device is called.
type migDevice struct {
	uuid, name string
	ret, named gonvml.Return
}

// migDevices are the MIG devices of a GPU by GPU and compute instance.
func (l *Library) migDevices(d *device) map[[2]int]migDevice {
	out := map[[2]int]migDevice{}
	most, _ := call(l, "DeviceGetMaxMigDeviceCount", func() (int, gonvml.Return) { return l.api.DeviceGetMaxMigDeviceCount(d.handle) })
	for i := range most {
		h, ret := call(l, "DeviceGetMigDeviceHandleByIndex", func() (gonvml.Device, gonvml.Return) { return l.api.DeviceGetMigDeviceHandleByIndex(d.handle, i) })
		if ret != gonvml.SUCCESS {
			continue // there are fewer
		}
		gi, ret := call(l, "DeviceGetGpuInstanceId", func() (int, gonvml.Return) { return l.api.DeviceGetGpuInstanceId(h) })
		ci, ret2 := call(l, "DeviceGetComputeInstanceId", func() (int, gonvml.Return) { return l.api.DeviceGetComputeInstanceId(h) })
		if ret != gonvml.SUCCESS || ret2 != gonvml.SUCCESS {
			continue
		}
		var m migDevice
		m.uuid, m.ret = call(l, "DeviceGetUUID", func() (string, gonvml.Return) { return l.api.DeviceGetUUID(h) })
		m.name, m.named = call(l, "DeviceGetName", func() (string, gonvml.Return) { return l.api.DeviceGetName(h) })
		out[[2]int{gi, ci}] = m
	}
	return out
}
