//go:build cgo

package nvml

import (
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuaas/millwright/agent/internal/gpu/serve"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// Once answers one question in a process that ends with it. Unlike the one that
// samples, it opens no GPU but the one that is meant.
func (l *Library) Once(path string, r *gpuv1.ChildRequest, to *gpuv1.ChildReply) error {
	if err := l.open(path); err != nil {
		return err
	}
	switch ask := r.GetAsk().(type) {
	case *gpuv1.ChildRequest_Look:
		looked, err := l.look(ask.Look)
		to.Answer = &gpuv1.ChildReply_Looked{Looked: looked}
		return err
	case *gpuv1.ChildRequest_Change:
		changed, err := l.change(ask.Change)
		to.Answer = &gpuv1.ChildReply_Changed{Changed: changed}
		return err
	}
	return &serve.Failure{State: gpuv1.DriverState_DRIVER_STATE_PROGRAM_UNUSABLE, Message: "a question that is not asked of a program for one answer"}
}

func (l *Library) look(q *gpuv1.ChildLook) (*gpuv1.ChildLooked, error) {
	if q.GetUuid() != "" {
		d, err := l.find(q.GetUuid())
		if err != nil {
			return nil, err
		}
		return &gpuv1.ChildLooked{Gpus: []*gpuv1.GpuLook{l.see(d, q.GetWhole())}}, nil
	}
	n, ret := call(l, "DeviceGetCount", func() (int, gonvml.Return) { return l.api.DeviceGetCount() })
	if ret != gonvml.SUCCESS {
		return nil, failed("DeviceGetCount", ret)
	}
	out := &gpuv1.ChildLooked{}
	for i := range n {
		d := l.at(i)
		if d.handle == nil {
			out.Gpus = append(out.Gpus, &gpuv1.GpuLook{Gpu: &gpuv1.Gpu{Index: uint32(i)}, Problem: problem("DeviceGetHandleByIndex", d.ret)})
			continue
		}
		out.Gpus = append(out.Gpus, l.see(d, q.GetWhole()))
	}
	return out, nil
}

func (l *Library) at(i int) *device {
	d := &device{index: i}
	if d.handle, d.ret = call(l, "DeviceGetHandleByIndex", func() (gonvml.Device, gonvml.Return) { return l.api.DeviceGetHandleByIndex(i) }); d.ret != gonvml.SUCCESS {
		d.handle = nil
	}
	return d
}

// find finds a GPU by its UUID. The driver has been seen not to find one that is
// there (go-nvml#41), so that its no is not taken before all were asked.
func (l *Library) find(uuid string) (*device, error) {
	const name = "DeviceGetHandleByUUID"
	h, ret := call(l, name, func() (gonvml.Device, gonvml.Return) { return l.api.DeviceGetHandleByUUID(uuid) })
	switch ret {
	case gonvml.SUCCESS:
		d := &device{handle: h, uuid: uuid}
		d.index, _ = call(l, "DeviceGetIndex", func() (int, gonvml.Return) { return l.api.DeviceGetIndex(h) })
		return d, nil
	case gonvml.ERROR_NOT_FOUND, gonvml.ERROR_INVALID_ARGUMENT, gonvml.ERROR_FUNCTION_NOT_FOUND: // asked again below
	default:
		return nil, failed(name, ret)
	}
	n, counted := call(l, "DeviceGetCount", func() (int, gonvml.Return) { return l.api.DeviceGetCount() })
	if counted != gonvml.SUCCESS {
		return nil, failed("DeviceGetCount", counted)
	}
	lost := gonvml.ERROR_NOT_FOUND
	for i := range n {
		d := l.at(i)
		if d.handle == nil {
			if d.ret == gonvml.ERROR_GPU_IS_LOST {
				lost = d.ret // it may be the one
			}
			continue
		}
		if d.uuid, ret = call(l, "DeviceGetUUID", func() (string, gonvml.Return) { return l.api.DeviceGetUUID(d.handle) }); ret == gonvml.SUCCESS && d.uuid == uuid {
			return d, nil
		}
	}
	return nil, failed(name, lost)
}

// problem is why a GPU has no answer.
func problem(name string, ret gonvml.Return) *gpuv1.ChildFailure {
	return &gpuv1.ChildFailure{State: gpuv1.DriverState_DRIVER_STATE_ERROR, Message: "nvml" + name + ": " + word(ret), Code: int32(ret)}
}

// see reads one GPU.
func (l *Library) see(d *device, whole bool) *gpuv1.GpuLook {
	r, g := &reading{l: l}, &gpuv1.Gpu{Index: uint32(d.index)}
	out := &gpuv1.GpuLook{Gpu: g}
	l.identity(r, d, g)
	if g.Uuid == nil {
		_, ret := call(l, "DeviceGetUUID", func() (string, gonvml.Return) { return l.api.DeviceGetUUID(d.handle) })
		out.Problem = problem("DeviceGetUUID", ret)
	}
	if whole {
		get(r, "persistence_mode", &g.PersistenceMode, "DeviceGetPersistenceMode", func() (bool, gonvml.Return) { return on(l.api.DeviceGetPersistenceMode(d.handle)) })
		l.mig(r, d, g)
		out.Profiles = l.profiles(d)
		out.Linked = l.linked(d)
		l.needs(d, out)
	}
	g.Unknown = r.unknown
	return out
}

// needs reads what is between a GPU and a change.
func (l *Library) needs(d *device, out *gpuv1.GpuLook) {
	values := []gonvml.FieldValue{{FieldId: gonvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if ret := l.fields(d, values); ret == gonvml.SUCCESS {
		n := uint32(number(values[0]))
		out.RecoveryAction = &n
	}
	mode, ret := call(l, "DeviceGetVirtualizationMode", func() (gonvml.GpuVirtualizationMode, gonvml.Return) {
		return l.api.DeviceGetVirtualizationMode(d.handle)
	})
	if ret == gonvml.SUCCESS {
		n := uint32(mode)
		out.Virtualization = &n
	}
	processes, _ := call(l, "DeviceGetComputeRunningProcesses", func() ([]gonvml.ProcessInfo, gonvml.Return) {
		return l.api.DeviceGetComputeRunningProcesses(d.handle)
	})
	for _, p := range processes {
		of := &gpuv1.GpuProcess{Pid: p.Pid}
		if p.GpuInstanceId != noInstance {
			of.GpuInstanceId = &p.GpuInstanceId
		}
		out.Processes = append(out.Processes, of)
	}
}

// linked are the UUIDs of the GPUs that a GPU reaches over NVLink, by itself or
// through switches.
func (l *Library) linked(d *device) []string {
	if len(l.linksOf(d)) == 0 {
		return nil
	}
	n, _ := call(l, "DeviceGetCount", func() (int, gonvml.Return) { return l.api.DeviceGetCount() })
	var out []string
	for i := range n {
		if i == d.index {
			continue
		}
		other := l.at(i)
		if other.handle == nil {
			continue
		}
		status, ret := call(l, "DeviceGetP2PStatus", func() (gonvml.GpuP2PStatus, gonvml.Return) {
			return l.api.DeviceGetP2PStatus(d.handle, other.handle, gonvml.P2P_CAPS_INDEX_NVLINK)
		})
		if ret != gonvml.SUCCESS || status != gonvml.P2P_STATUS_OK {
			continue
		}
		if uuid, ret := call(l, "DeviceGetUUID", func() (string, gonvml.Return) { return l.api.DeviceGetUUID(other.handle) }); ret == gonvml.SUCCESS {
			out = append(out, uuid)
		}
	}
	slices.Sort(out)
	return out
}
