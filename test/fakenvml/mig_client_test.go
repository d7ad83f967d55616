package fakenvml_test

import "github.com/NVIDIA/go-nvml/pkg/nvml"

// migQuestion finds instances anew for each question, as a client does that was
// started again: no handle of an earlier question is kept.
func migQuestion(q question, d nvml.Device) reply {
	switch q.Op {
	case "create-gi": // driver id, start, size
		info := nvml.GpuInstanceProfileInfo{Id: q.Args[0]}
		gi, r := d.CreateGpuInstanceWithPlacement(&info, &nvml.GpuInstancePlacement{Start: q.Args[1], Size: q.Args[2]})
		if r != nvml.SUCCESS {
			return code(r)
		}
		i, r := gi.GetInfo()
		return code(r, int64(i.Id))
	case "capacity":
		n, r := d.GetGpuInstanceRemainingCapacity(&nvml.GpuInstanceProfileInfo{Id: q.Args[0]})
		return code(r, int64(n))
	case "mig-device":
		m, r := d.GetMigDeviceHandleByIndex(int(q.Args[0]))
		if r != nvml.SUCCESS {
			return code(r)
		}
		u, r := m.GetUUID()
		return reply{Ret: int(r), Text: u}
	}
	gi, r := d.GetGpuInstanceById(int(q.Args[0]))
	if r != nvml.SUCCESS {
		return code(r)
	}
	switch q.Op {
	case "destroy-gi":
		return code(gi.Destroy())
	case "create-ci": // instance, profile
		ci, r := gi.CreateComputeInstance(&nvml.ComputeInstanceProfileInfo{Id: q.Args[1]})
		if r != nvml.SUCCESS {
			return code(r)
		}
		i, r := ci.GetInfo()
		return code(r, int64(i.Id))
	case "destroy-ci":
		ci, r := gi.GetComputeInstanceById(int(q.Args[1]))
		if r != nvml.SUCCESS {
			return code(r)
		}
		return code(ci.Destroy())
	}
	return reply{Ret: -1, Text: "unknown question " + q.Op}
}
