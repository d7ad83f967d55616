//go:build cgo

package nvml

import (
	"encoding/binary"
	"math"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// Sample reads how the GPUs are that were there when they were last enumerated.
func (l *Library) Sample(tier gpuv1.Tier) (*gpuv1.Sample, error) {
	r := &reading{l: l}
	s := &gpuv1.Sample{ReadAt: timestamppb.New(l.clock.Now()), Tier: tier}
	get(r, "count", &s.Count, "DeviceGetCount", func() (uint32, gonvml.Return) { return u32(l.api.DeviceGetCount()) })
	for _, d := range l.all() {
		g := &gpuv1.GpuSample{Index: uint32(d.index), Uuid: d.uuid, PciBusId: d.pci}
		of := &reading{l: l}
		if d.handle == nil {
			of.missAll(g, "DeviceGetHandleByIndex", d.ret, but(tier)...)
		} else {
			l.fast(of, d, g)
			if tier == gpuv1.Tier_TIER_SLOW {
				l.slow(of, d, g)
			}
		}
		g.Unknown = of.unknown
		s.Gpus = append(s.Gpus, g)
	}
	s.Unknown = r.unknown
	return s, nil
}

// but are the values that a sample of a tier does not speak of.
func but(tier gpuv1.Tier) []string {
	if tier == gpuv1.Tier_TIER_SLOW {
		return nil
	}
	var out []string
	fields := (&gpuv1.GpuSample{}).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); f.Number() >= firstSlow {
			out = append(out, string(f.Name()))
		}
	}
	return out
}

// firstSlow is the number of the first field of the slow tier.
const firstSlow = 50

// fieldOf is a value that is read with all others in one call.
type fieldOf struct {
	id   uint32
	name string
	set  func(g *gpuv1.GpuSample, n uint64)
}

func wide(to func(*gpuv1.GpuSample) **uint64) func(*gpuv1.GpuSample, uint64) {
	return func(g *gpuv1.GpuSample, n uint64) { *to(g) = &n }
}

func narrow(to func(*gpuv1.GpuSample) **uint32) func(*gpuv1.GpuSample, uint64) {
	return func(g *gpuv1.GpuSample, n uint64) { v := uint32(n); *to(g) = &v }
}

func truth(to func(*gpuv1.GpuSample) **bool) func(*gpuv1.GpuSample, uint64) {
	return func(g *gpuv1.GpuSample, n uint64) { v := n != 0; *to(g) = &v }
}

var fastFields = []fieldOf{
	{gonvml.FI_DEV_GET_GPU_RECOVERY_ACTION, "recovery_action", narrow(func(g *gpuv1.GpuSample) **uint32 { return &g.RecoveryAction })},
	{gonvml.FI_DEV_MEMORY_TEMP, "memory_celsius", narrow(func(g *gpuv1.GpuSample) **uint32 { return &g.MemoryCelsius })},
	{gonvml.FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP, "throttle_power_cap_nanoseconds", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.ThrottlePowerCapNanoseconds })},
	{gonvml.FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, "throttle_sw_thermal_nanoseconds", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.ThrottleSwThermalNanoseconds })},
	{gonvml.FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, "throttle_hw_thermal_nanoseconds", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.ThrottleHwThermalNanoseconds })},
	{gonvml.FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, "throttle_power_brake_nanoseconds", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.ThrottlePowerBrakeNanoseconds })},
	{gonvml.FI_DEV_ECC_SBE_VOL_TOTAL, "ecc_corrected_volatile", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.EccCorrectedVolatile })},
	{gonvml.FI_DEV_ECC_DBE_VOL_TOTAL, "ecc_uncorrected_volatile", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.EccUncorrectedVolatile })},
	{gonvml.FI_DEV_ECC_SBE_AGG_TOTAL, "ecc_corrected_aggregate", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.EccCorrectedAggregate })},
	{gonvml.FI_DEV_ECC_DBE_AGG_TOTAL, "ecc_uncorrected_aggregate", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.EccUncorrectedAggregate })},
	{gonvml.FI_DEV_REMAPPED_COR, "remapped_rows_corrected", narrow(func(g *gpuv1.GpuSample) **uint32 { return &g.RemappedRowsCorrected })},
	{gonvml.FI_DEV_REMAPPED_UNC, "remapped_rows_uncorrected", narrow(func(g *gpuv1.GpuSample) **uint32 { return &g.RemappedRowsUncorrected })},
	{gonvml.FI_DEV_REMAPPED_PENDING, "remap_pending", truth(func(g *gpuv1.GpuSample) **bool { return &g.RemapPending })},
	{gonvml.FI_DEV_REMAPPED_FAILURE, "remap_failed", truth(func(g *gpuv1.GpuSample) **bool { return &g.RemapFailed })},
	{gonvml.FI_DEV_PCIE_REPLAY_COUNTER, "pcie_replays", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.PcieReplays })},
	{gonvml.FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, "nvlink_crc_errors", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.NvlinkCrcErrors })},
	{gonvml.FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, "nvlink_replay_errors", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.NvlinkReplayErrors })},
	{gonvml.FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, "nvlink_recovery_errors", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.NvlinkRecoveryErrors })},
}

var slowFields = []fieldOf{
	{gonvml.FI_DEV_PCIE_COUNT_FATAL_ERROR, "pcie_fatal_errors", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.PcieFatalErrors })},
	{gonvml.FI_DEV_PCIE_COUNT_NON_FATAL_ERROR, "pcie_nonfatal_errors", wide(func(g *gpuv1.GpuSample) **uint64 { return &g.PcieNonfatalErrors })},
	{gonvml.FI_DEV_RETIRED_SBE, "retired_pages_corrected", narrow(func(g *gpuv1.GpuSample) **uint32 { return &g.RetiredPagesCorrected })},
	{gonvml.FI_DEV_RETIRED_DBE, "retired_pages_uncorrected", narrow(func(g *gpuv1.GpuSample) **uint32 { return &g.RetiredPagesUncorrected })},
	{gonvml.FI_DEV_RETIRED_PENDING, "retirement_pending", truth(func(g *gpuv1.GpuSample) **bool { return &g.RetirementPending })},
}

const fieldValues = "DeviceGetFieldValues"

// fields reads field values; each has its own result, which becomes the one of
// the call when that failed as a whole.
func (l *Library) fields(d *device, values []gonvml.FieldValue) gonvml.Return {
	_, ret := call(l, fieldValues, func() (none, gonvml.Return) { return none{}, l.api.DeviceGetFieldValues(d.handle, values) })
	for i := range values {
		if ret != gonvml.SUCCESS {
			values[i].NvmlReturn = uint32(ret)
		}
	}
	if ret == gonvml.SUCCESS && len(values) == 1 {
		return gonvml.Return(values[0].NvmlReturn)
	}
	return ret
}

func (l *Library) read(r *reading, d *device, g *gpuv1.GpuSample, of []fieldOf) {
	values := make([]gonvml.FieldValue, len(of))
	for i := range of {
		values[i].FieldId = of[i].id
	}
	_ = l.fields(d, values) // each value has its own return
	for i, f := range of {
		if ret := gonvml.Return(values[i].NvmlReturn); ret != gonvml.SUCCESS {
			r.miss(f.name, fieldValues, ret)
			continue
		}
		f.set(g, number(values[i]))
	}
}

// number is a field's value as its type says.
func number(v gonvml.FieldValue) uint64 {
	n := binary.NativeEndian.Uint64(v.Value[:])
	switch gonvml.ValueType(v.ValueType) {
	case gonvml.VALUE_TYPE_UNSIGNED_INT:
		return uint64(binary.NativeEndian.Uint32(v.Value[:4]))
	case gonvml.VALUE_TYPE_SIGNED_INT:
		return uint64(max(0, int32(binary.NativeEndian.Uint32(v.Value[:4]))))
	case gonvml.VALUE_TYPE_UNSIGNED_SHORT:
		return uint64(binary.NativeEndian.Uint16(v.Value[:2]))
	case gonvml.VALUE_TYPE_DOUBLE:
		return uint64(max(0, math.Float64frombits(n)))
	case gonvml.VALUE_TYPE_SIGNED_LONG_LONG:
		return uint64(max(0, int64(n)))
	default: // the unsigned ones of 64 bits
		return n
	}
}

func (l *Library) fast(r *reading, d *device, g *gpuv1.GpuSample) {
	l.read(r, d, g, fastFields)
	get(r, "gpu_celsius", &g.GpuCelsius, "DeviceGetTemperature", func() (uint32, gonvml.Return) { return l.api.DeviceGetTemperature(d.handle, gonvml.TEMPERATURE_GPU) })
	get(r, "power_milliwatts", &g.PowerMilliwatts, "DeviceGetPowerUsage", func() (uint64, gonvml.Return) {
		mw, ret := l.api.DeviceGetPowerUsage(d.handle)
		return uint64(mw), ret
	})
	get(r, "power_limit_milliwatts", &g.PowerLimitMilliwatts, "DeviceGetEnforcedPowerLimit", func() (uint64, gonvml.Return) {
		mw, ret := l.api.DeviceGetEnforcedPowerLimit(d.handle)
		return uint64(mw), ret
	})
	get(r, "sm_clock_mhz", &g.SmClockMhz, "DeviceGetClockInfo", func() (uint32, gonvml.Return) { return l.api.DeviceGetClockInfo(d.handle, gonvml.CLOCK_SM) })
	get(r, "memory_clock_mhz", &g.MemoryClockMhz, "DeviceGetClockInfo", func() (uint32, gonvml.Return) { return l.api.DeviceGetClockInfo(d.handle, gonvml.CLOCK_MEM) })
	if l.has["DeviceGetCurrentClocksEventReasons"] {
		get(r, "clock_reasons", &g.ClockReasons, "DeviceGetCurrentClocksEventReasons", func() (uint64, gonvml.Return) { return l.api.DeviceGetCurrentClocksEventReasons(d.handle) })
	} else { // its name before driver 535
		get(r, "clock_reasons", &g.ClockReasons, "DeviceGetCurrentClocksThrottleReasons", func() (uint64, gonvml.Return) { return l.api.DeviceGetCurrentClocksThrottleReasons(d.handle) })
	}
	u, ret := call(l, "DeviceGetUtilizationRates", func() (gonvml.Utilization, gonvml.Return) { return l.api.DeviceGetUtilizationRates(d.handle) })
	put(r, "gpu_utilization_percent", &g.GpuUtilizationPercent, u.Gpu, "DeviceGetUtilizationRates", ret)
	put(r, "memory_utilization_percent", &g.MemoryUtilizationPercent, u.Memory, "DeviceGetUtilizationRates", ret)
	m, name, ret := l.memory(d)
	put(r, "memory_used_bytes", &g.MemoryUsedBytes, m.Used, name, ret)
	put(r, "memory_free_bytes", &g.MemoryFreeBytes, m.Free, name, ret)
}

func (l *Library) slow(r *reading, d *device, g *gpuv1.GpuSample) {
	l.read(r, d, g, slowFields)
	h, ret := call(l, "DeviceGetRowRemapperHistogram", func() (gonvml.RowRemapperHistogramValues, gonvml.Return) {
		return l.api.DeviceGetRowRemapperHistogram(d.handle)
	})
	put(r, "remap_banks_exhausted", &g.RemapBanksExhausted, h.None, "DeviceGetRowRemapperHistogram", ret)
	put(r, "remap_banks_low", &g.RemapBanksLow, h.Low, "DeviceGetRowRemapperHistogram", ret)
	e, ret := call(l, "DeviceGetSramEccErrorStatus", func() (gonvml.EccSramErrorStatus, gonvml.Return) { return l.api.DeviceGetSramEccErrorStatus(d.handle) })
	put(r, "sram_threshold_exceeded", &g.SramThresholdExceeded, e.BThresholdExceeded != 0, "DeviceGetSramEccErrorStatus", ret)
	put(r, "sram_uncorrected_aggregate", &g.SramUncorrectedAggregate, e.AggregateUncParity+e.AggregateUncSecDed, "DeviceGetSramEccErrorStatus", ret)
	get(r, "pcie_generation", &g.PcieGeneration, "DeviceGetCurrPcieLinkGeneration", func() (uint32, gonvml.Return) { return u32(l.api.DeviceGetCurrPcieLinkGeneration(d.handle)) })
	get(r, "pcie_width", &g.PcieWidth, "DeviceGetCurrPcieLinkWidth", func() (uint32, gonvml.Return) { return u32(l.api.DeviceGetCurrPcieLinkWidth(d.handle)) })
	now, next, ret := l.ecc(d)
	put(r, "ecc_enabled", &g.EccEnabled, now, "DeviceGetEccMode", ret)
	put(r, "ecc_pending", &g.EccPending, next, "DeviceGetEccMode", ret)
	now, next, ret = l.migMode(d)
	put(r, "mig_enabled", &g.MigEnabled, now, "DeviceGetMigMode", ret)
	put(r, "mig_pending", &g.MigPending, next, "DeviceGetMigMode", ret)
	get(r, "persistence_mode", &g.PersistenceMode, "DeviceGetPersistenceMode", func() (bool, gonvml.Return) { return on(l.api.DeviceGetPersistenceMode(d.handle)) })
	get(r, "processes", &g.Processes, "DeviceGetComputeRunningProcesses", func() (uint32, gonvml.Return) {
		p, ret := l.api.DeviceGetComputeRunningProcesses(d.handle)
		return uint32(len(p)), ret
	})
	l.linkCounters(d, g)
	g.Fabric = l.fabric(r, d)
}

// linkField is one counter of a link.
type linkField struct {
	id   uint32
	name string
	to   func(*gpuv1.NvLinkSample) **uint64
}

var linkFields = []linkField{
	{gonvml.FI_DEV_NVLINK_ERROR_DL_REPLAY, "replay_errors", func(n *gpuv1.NvLinkSample) **uint64 { return &n.ReplayErrors }},
	{gonvml.FI_DEV_NVLINK_ERROR_DL_RECOVERY, "recovery_errors", func(n *gpuv1.NvLinkSample) **uint64 { return &n.RecoveryErrors }},
	{gonvml.FI_DEV_NVLINK_ERROR_DL_CRC, "crc_errors", func(n *gpuv1.NvLinkSample) **uint64 { return &n.CrcErrors }},
	{gonvml.FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS, "symbol_errors", func(n *gpuv1.NvLinkSample) **uint64 { return &n.SymbolErrors }},
	{gonvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, "failed_recoveries", func(n *gpuv1.NvLinkSample) **uint64 { return &n.FailedRecoveries }},
}

// linkCounters reads the counters of all links in one call.
func (l *Library) linkCounters(d *device, g *gpuv1.GpuSample) {
	if len(d.links) == 0 {
		return
	}
	values := make([]gonvml.FieldValue, 0, len(d.links)*len(linkFields))
	for _, link := range d.links {
		for _, f := range linkFields {
			values = append(values, gonvml.FieldValue{FieldId: f.id, ScopeId: uint32(link)})
		}
	}
	_ = l.fields(d, values) // each value has its own return
	for i, link := range d.links {
		r, n := &reading{l: l}, &gpuv1.NvLinkSample{Link: uint32(link)}
		get(r, "active", &n.Active, "DeviceGetNvLinkState", func() (bool, gonvml.Return) { return on(l.api.DeviceGetNvLinkState(d.handle, link)) })
		for j, f := range linkFields {
			v := values[i*len(linkFields)+j]
			put(r, f.name, f.to(n), number(v), fieldValues, gonvml.Return(v.NvmlReturn))
		}
		n.Unknown = r.unknown
		g.Nvlinks = append(g.Nvlinks, n)
	}
}
