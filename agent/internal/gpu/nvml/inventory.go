//go:build cgo

package nvml

import (
	"encoding/hex"
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// Inventory looks for the GPUs anew and reads what they are.
func (l *Library) Inventory() (*gpuv1.Inventory, error) {
	if err := l.enumerate(); err != nil {
		return nil, err
	}
	r := &reading{l: l}
	inv := &gpuv1.Inventory{ReadAt: timestamppb.New(l.clock.Now()), MissingFunctions: l.lacks()}
	get(r, "driver_version", &inv.DriverVersion, "SystemGetDriverVersion", l.api.SystemGetDriverVersion)
	get(r, "nvml_version", &inv.NvmlVersion, "SystemGetNVMLVersion", l.api.SystemGetNVMLVersion)
	get(r, "cuda_version", &inv.CudaVersion, "SystemGetCudaDriverVersion", func() (string, gonvml.Return) {
		v, ret := l.api.SystemGetCudaDriverVersion()
		return fmt.Sprintf("%d.%d", v/1000, v%1000/10), ret
	})
	all := l.all()
	for i, d := range all {
		inv.Gpus = append(inv.Gpus, l.gpu(d))
		for _, other := range all[i+1:] {
			inv.Topology = append(inv.Topology, l.pair(d, other))
		}
	}
	inv.Unknown = r.unknown
	return inv, nil
}

func (l *Library) gpu(d *device) *gpuv1.Gpu {
	r, g := &reading{l: l}, &gpuv1.Gpu{Index: uint32(d.index)}
	if d.handle == nil {
		if r.missAll(g, "DeviceGetHandleByIndex", d.ret); d.uuid != "" {
			g.Uuid, g.PciBusId = &d.uuid, &d.pci
			r.unknown = nil
			r.missAll(g, "DeviceGetHandleByIndex", d.ret, "uuid", "pci_bus_id")
		}
		g.Unknown = r.unknown
		return g
	}
	l.identity(r, d, g)
	l.board(r, d, g)
	l.limits(r, d, g)
	l.mig(r, d, g)
	for _, link := range d.links {
		g.Nvlinks = append(g.Nvlinks, l.link(d, link))
	}
	g.Fabric = l.fabric(r, d)
	g.Unknown = r.unknown
	return g
}

func (l *Library) identity(r *reading, d *device, g *gpuv1.Gpu) {
	get(r, "uuid", &g.Uuid, "DeviceGetUUID", func() (string, gonvml.Return) { return l.api.DeviceGetUUID(d.handle) })
	get(r, "model", &g.Model, "DeviceGetName", func() (string, gonvml.Return) { return l.api.DeviceGetName(d.handle) })
	get(r, "serial", &g.Serial, "DeviceGetSerial", func() (string, gonvml.Return) { return l.api.DeviceGetSerial(d.handle) })
	get(r, "board_part_number", &g.BoardPartNumber, "DeviceGetBoardPartNumber", func() (string, gonvml.Return) { return l.api.DeviceGetBoardPartNumber(d.handle) })
	pci, ret := call(l, "DeviceGetPciInfo", func() (gonvml.PciInfo, gonvml.Return) { return l.api.DeviceGetPciInfo(d.handle) })
	put(r, "pci_bus_id", &g.PciBusId, place(pci), "DeviceGetPciInfo", ret)
	put(r, "pci_device_id", &g.PciDeviceId, pci.PciDeviceId, "DeviceGetPciInfo", ret)
	put(r, "pci_subsystem_id", &g.PciSubsystemId, pci.PciSubSystemId, "DeviceGetPciInfo", ret)
	get(r, "minor_number", &g.MinorNumber, "DeviceGetMinorNumber", func() (uint32, gonvml.Return) { return u32(l.api.DeviceGetMinorNumber(d.handle)) })
	get(r, "architecture", &g.Architecture, "DeviceGetArchitecture", func() (uint32, gonvml.Return) {
		a, ret := l.api.DeviceGetArchitecture(d.handle)
		return uint32(a), ret
	})
	get(r, "compute_capability", &g.ComputeCapability, "DeviceGetCudaComputeCapability", func() (string, gonvml.Return) {
		major, minor, ret := l.api.DeviceGetCudaComputeCapability(d.handle)
		return fmt.Sprintf("%d.%d", major, minor), ret
	})
}

func (l *Library) board(r *reading, d *device, g *gpuv1.Gpu) {
	m, name, ret := l.memory(d)
	put(r, "memory_bytes", &g.MemoryBytes, m.Total, name, ret)
	get(r, "vbios_version", &g.VbiosVersion, "DeviceGetVbiosVersion", func() (string, gonvml.Return) { return l.api.DeviceGetVbiosVersion(d.handle) })
	get(r, "inforom_version", &g.InforomVersion, "DeviceGetInforomImageVersion", func() (string, gonvml.Return) { return l.api.DeviceGetInforomImageVersion(d.handle) })
	get(r, "inforom_valid", &g.InforomValid, "DeviceValidateInforom", func() (bool, gonvml.Return) {
		ret := l.api.DeviceValidateInforom(d.handle)
		if ret == gonvml.ERROR_CORRUPTED_INFOROM {
			return false, gonvml.SUCCESS
		}
		return true, ret
	})
	get(r, "pcie_max_generation", &g.PcieMaxGeneration, "DeviceGetMaxPcieLinkGeneration", func() (uint32, gonvml.Return) { return u32(l.api.DeviceGetMaxPcieLinkGeneration(d.handle)) })
	get(r, "pcie_gpu_max_generation", &g.PcieGpuMaxGeneration, "DeviceGetGpuMaxPcieLinkGeneration", func() (uint32, gonvml.Return) { return u32(l.api.DeviceGetGpuMaxPcieLinkGeneration(d.handle)) })
	get(r, "pcie_max_width", &g.PcieMaxWidth, "DeviceGetMaxPcieLinkWidth", func() (uint32, gonvml.Return) { return u32(l.api.DeviceGetMaxPcieLinkWidth(d.handle)) })
	now, next, ret := l.ecc(d)
	put(r, "ecc_enabled", &g.EccEnabled, now, "DeviceGetEccMode", ret)
	put(r, "ecc_pending", &g.EccPending, next, "DeviceGetEccMode", ret)
	get(r, "persistence_mode", &g.PersistenceMode, "DeviceGetPersistenceMode", func() (bool, gonvml.Return) { return on(l.api.DeviceGetPersistenceMode(d.handle)) })
}

func (l *Library) limits(r *reading, d *device, g *gpuv1.Gpu) {
	type limits struct{ low, high uint32 }
	p, ret := call(l, "DeviceGetPowerManagementLimitConstraints", func() (limits, gonvml.Return) {
		low, high, ret := l.api.DeviceGetPowerManagementLimitConstraints(d.handle)
		return limits{low, high}, ret
	})
	put(r, "power_limit_min_milliwatts", &g.PowerLimitMinMilliwatts, uint64(p.low), "DeviceGetPowerManagementLimitConstraints", ret)
	put(r, "power_limit_max_milliwatts", &g.PowerLimitMaxMilliwatts, uint64(p.high), "DeviceGetPowerManagementLimitConstraints", ret)
	for _, t := range []struct {
		field string
		to    **uint32
		kind  gonvml.TemperatureThresholds
	}{
		{"shutdown_celsius", &g.ShutdownCelsius, gonvml.TEMPERATURE_THRESHOLD_SHUTDOWN},
		{"slowdown_celsius", &g.SlowdownCelsius, gonvml.TEMPERATURE_THRESHOLD_SLOWDOWN},
		{"gpu_max_celsius", &g.GpuMaxCelsius, gonvml.TEMPERATURE_THRESHOLD_GPU_MAX},
		{"memory_max_celsius", &g.MemoryMaxCelsius, gonvml.TEMPERATURE_THRESHOLD_MEM_MAX},
	} {
		get(r, t.field, t.to, "DeviceGetTemperatureThreshold", func() (uint32, gonvml.Return) { return l.api.DeviceGetTemperatureThreshold(d.handle, t.kind) })
	}
	get(r, "sm_clock_max_mhz", &g.SmClockMaxMhz, "DeviceGetMaxClockInfo", func() (uint32, gonvml.Return) { return l.api.DeviceGetMaxClockInfo(d.handle, gonvml.CLOCK_SM) })
}

// memory reads the memory; the newer function keeps what the driver took for
// itself apart from what programs use.
func (l *Library) memory(d *device) (m gonvml.Memory, name string, ret gonvml.Return) {
	if l.has["DeviceGetMemoryInfo_v2"] {
		v2, ret := call(l, "DeviceGetMemoryInfo_v2", func() (gonvml.Memory_v2, gonvml.Return) { return l.api.DeviceGetMemoryInfo_v2(d.handle) })
		if ret == gonvml.SUCCESS {
			return gonvml.Memory{Total: v2.Total, Free: v2.Free, Used: v2.Used}, "DeviceGetMemoryInfo_v2", ret //nolint:nilerr // NVML's success is a value of its error type
		}
	}
	m, ret = call(l, "DeviceGetMemoryInfo", func() (gonvml.Memory, gonvml.Return) { return l.api.DeviceGetMemoryInfo(d.handle) })
	return m, "DeviceGetMemoryInfo", ret
}

func (l *Library) ecc(d *device) (now, next bool, ret gonvml.Return) {
	type mode struct{ now, next bool }
	m, ret := call(l, "DeviceGetEccMode", func() (mode, gonvml.Return) {
		now, next, ret := l.api.DeviceGetEccMode(d.handle)
		return mode{now == gonvml.FEATURE_ENABLED, next == gonvml.FEATURE_ENABLED}, ret
	})
	return m.now, m.next, ret
}

func on(s gonvml.EnableState, ret gonvml.Return) (bool, gonvml.Return) {
	return s == gonvml.FEATURE_ENABLED, ret
}

func (l *Library) link(d *device, link int) *gpuv1.NvLink {
	r, n := &reading{l: l}, &gpuv1.NvLink{Link: uint32(link)}
	get(r, "active", &n.Active, "DeviceGetNvLinkState", func() (bool, gonvml.Return) { return on(l.api.DeviceGetNvLinkState(d.handle, link)) })
	get(r, "version", &n.Version, "DeviceGetNvLinkVersion", func() (uint32, gonvml.Return) { return l.api.DeviceGetNvLinkVersion(d.handle, link) })
	get(r, "remote_pci_bus_id", &n.RemotePciBusId, "DeviceGetNvLinkRemotePciInfo", func() (string, gonvml.Return) {
		p, ret := l.api.DeviceGetNvLinkRemotePciInfo(d.handle, link)
		return place(p), ret
	})
	get(r, "remote_device_type", &n.RemoteDeviceType, "DeviceGetNvLinkRemoteDeviceType", func() (uint32, gonvml.Return) {
		t, ret := l.api.DeviceGetNvLinkRemoteDeviceType(d.handle, link)
		return uint32(t), ret
	})
	n.Unknown = r.unknown
	return n
}

// fabric reads a GPU's place in an NVLink fabric, by the newest form that the
// driver knows.
func (l *Library) fabric(r *reading, d *device) *gpuv1.Fabric {
	const name = "DeviceGetGpuFabricInfoV"
	f3, ret := call(l, name, func() (gonvml.GpuFabricInfo_v3, gonvml.Return) { return l.api.DeviceGetGpuFabricInfoV(d.handle).V3() })
	if ret == gonvml.SUCCESS {
		mask, sum := f3.HealthMask, uint32(f3.HealthSummary)
		return &gpuv1.Fabric{
			ClusterUuid: hex.EncodeToString(f3.ClusterUuid[:]), CliqueId: f3.CliqueId, State: uint32(f3.State), Status: int32(f3.Status),
			HealthMask: &mask, HealthSummary: &sum,
		}
	}
	of := &reading{l: l}
	f2, ret := call(l, name, func() (gonvml.GpuFabricInfo_v2, gonvml.Return) { return l.api.DeviceGetGpuFabricInfoV(d.handle).V2() })
	if ret == gonvml.SUCCESS {
		of.miss("health_summary", name, gonvml.ERROR_ARGUMENT_VERSION_MISMATCH)
		mask := f2.HealthMask
		return &gpuv1.Fabric{
			ClusterUuid: hex.EncodeToString(f2.ClusterUuid[:]), CliqueId: f2.CliqueId, State: uint32(f2.State), Status: int32(f2.Status),
			HealthMask: &mask, Unknown: of.unknown,
		}
	}
	f1, ret := call(l, "DeviceGetGpuFabricInfo", func() (gonvml.GpuFabricInfo, gonvml.Return) { return l.api.DeviceGetGpuFabricInfo(d.handle) })
	if ret != gonvml.SUCCESS {
		r.miss("fabric", "DeviceGetGpuFabricInfo", ret)
		return nil
	}
	of.missAll(&gpuv1.Fabric{}, name, gonvml.ERROR_FUNCTION_NOT_FOUND)
	return &gpuv1.Fabric{
		ClusterUuid: hex.EncodeToString(f1.ClusterUuid[:]), CliqueId: f1.CliqueId, State: uint32(f1.State), Status: int32(f1.Status), Unknown: of.unknown,
	}
}

func (l *Library) pair(a, b *device) *gpuv1.GpuPair {
	r, p := &reading{l: l}, &gpuv1.GpuPair{A: uint32(a.index), B: uint32(b.index)}
	if a.handle == nil || b.handle == nil {
		r.missAll(p, "DeviceGetHandleByIndex", gonvml.ERROR_GPU_IS_LOST)
	} else {
		get(r, "common_ancestor", &p.CommonAncestor, "DeviceGetTopologyCommonAncestor", func() (uint32, gonvml.Return) {
			level, ret := l.api.DeviceGetTopologyCommonAncestor(a.handle, b.handle)
			return uint32(level), ret
		})
		get(r, "p2p_nvlink_status", &p.P2PNvlinkStatus, "DeviceGetP2PStatus", func() (uint32, gonvml.Return) {
			status, ret := l.api.DeviceGetP2PStatus(a.handle, b.handle, gonvml.P2P_CAPS_INDEX_NVLINK)
			return uint32(status), ret
		})
	}
	p.Unknown = r.unknown
	return p
}
