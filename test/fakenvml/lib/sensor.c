// What a GPU measures and counts.
#define _GNU_SOURCE
#include "fake.h"
#include <string.h>

// A function that answers with one number of the GPU.
#define READ(function, type, expression) \
	nvmlReturn_t function(nvmlDevice_t device, type *out) \
	{ \
		FK_GPU(device); \
		FK_ARG(out); \
		*out = (expression); \
		return fk_leave(NVML_SUCCESS); \
	}

READ(nvmlDeviceGetPowerUsage, unsigned int, g->v[v_power_mw])
READ(nvmlDeviceGetEnforcedPowerLimit, unsigned int, g->v[v_power_limit_mw])
READ(nvmlDeviceGetPowerManagementLimit, unsigned int, g->v[v_power_limit_mw])
READ(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, fk_product_find(g->product)->power_mw)
READ(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, g->v[v_energy_mj])
READ(nvmlDeviceGetPerformanceState, nvmlPstates_t, g->v[v_pstate])
READ(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, g->v[v_clock_reasons])
READ(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, g->v[v_clock_reasons])
READ(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, g->v[v_persistence])
READ(nvmlDeviceGetPcieReplayCounter, unsigned int, g->v[v_pcie_replay])
READ(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, g->v[v_pcie_generation])
READ(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, g->v[v_pcie_width])
READ(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, g->v[v_pcie_generation_max])
READ(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned int, g->v[v_pcie_generation_max])
READ(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, g->v[v_pcie_width_max])
READ(nvmlDeviceGetVirtualizationMode, nvmlGpuVirtualizationMode_t, g->v[v_virtualization])
READ(nvmlDeviceGetInforomConfigurationChecksum, unsigned int, g->v[v_inforom_checksum])

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
	FK_GPU(device);
	FK_ARG(mode == NVML_FEATURE_ENABLED || mode == NVML_FEATURE_DISABLED);
	fk_change()->gpu[g->number].v[v_persistence] = mode;
	fk_commit();
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceValidateInforom(nvmlDevice_t device)
{
	FK_GPU(device);
	return fk_leave(g->v[v_inforom_corrupt] ? NVML_ERROR_CORRUPTED_INFOROM : NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *temperature)
{
	FK_GPU(device);
	FK_ARG(sensor == NVML_TEMPERATURE_GPU && temperature);
	*temperature = g->v[v_temperature];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *t)
{
	FK_GPU(device);
	FK_ARG(t && t->sensorType == NVML_TEMPERATURE_GPU);
	if (t->version != nvmlTemperature_v1) return fk_leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	t->temperature = g->v[v_temperature];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *t)
{
	FK_GPU(device);
	FK_ARG(t);
	if (t->version != nvmlMarginTemperature_v1) return fk_leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	if (!g->v[v_resetless]) return fk_leave(NVML_ERROR_NOT_SUPPORTED); // Hopper and later
	t->marginTemperature = g->v[v_margin];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t type, unsigned int *temperature)
{
	FK_GPU(device);
	FK_ARG(temperature);
	int at = type == NVML_TEMPERATURE_THRESHOLD_SHUTDOWN ? v_threshold_shutdown
		: type == NVML_TEMPERATURE_THRESHOLD_SLOWDOWN ? v_threshold_slowdown
		: type == NVML_TEMPERATURE_THRESHOLD_MEM_MAX ? v_threshold_mem_max
		: type == NVML_TEMPERATURE_THRESHOLD_GPU_MAX ? v_threshold_gpu_max : -1;
	if (at < 0) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	*temperature = g->v[at];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *u)
{
	FK_GPU(device);
	FK_ARG(u);
	if (g->v[v_mig_current]) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	u->gpu = g->v[v_utilization_gpu];
	u->memory = g->v[v_utilization_memory];
	return fk_leave(NVML_SUCCESS);
}

#define MIB (1024ull * 1024)

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *m)
{
	FK_GPU(device);
	FK_ARG(m);
	m->total = g->v[v_memory_total_mib] * MIB;
	m->used = g->v[v_memory_used_mib] * MIB;
	m->free = m->total - m->used;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *m)
{
	FK_GPU(device);
	FK_ARG(m);
	if (m->version != nvmlMemory_v2) return fk_leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	m->total = g->v[v_memory_total_mib] * MIB;
	m->used = g->v[v_memory_used_mib] * MIB;
	m->reserved = 0;
	m->free = m->total - m->used;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
	FK_GPU(device);
	FK_ARG(clock);
	if (type == NVML_CLOCK_SM || type == NVML_CLOCK_GRAPHICS) *clock = g->v[v_clock_sm];
	else if (type == NVML_CLOCK_MEM) *clock = g->v[v_clock_memory];
	else return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	return fk_leave(NVML_SUCCESS);
}

// The boost clocks and the lowest power limits of NVIDIA's data sheets, by
// generation.
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
	FK_GPU(device);
	uint32_t arch = fk_product_find(g->product)->arch;
	FK_ARG(clock);
	if (type == NVML_CLOCK_SM || type == NVML_CLOCK_GRAPHICS) *clock = arch < NVML_DEVICE_ARCH_HOPPER ? 1410 : arch == NVML_DEVICE_ARCH_HOPPER ? 1980 : 1965;
	else if (type == NVML_CLOCK_MEM) *clock = arch < NVML_DEVICE_ARCH_HOPPER ? 1593 : arch == NVML_DEVICE_ARCH_HOPPER ? 2619 : 3996;
	else return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *low, unsigned int *high)
{
	FK_GPU(device);
	const fk_product *p = fk_product_find(g->product);
	FK_ARG(low && high);
	*low = p->arch < NVML_DEVICE_ARCH_HOPPER ? 100000 : 200000;
	*high = p->power_mw;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
	FK_GPU(device);
	FK_ARG(current && pending);
	*current = g->v[v_ecc_current];
	*pending = g->v[v_ecc_pending];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter, unsigned long long *count)
{
	FK_GPU(device);
	FK_ARG(count);
	if (!g->v[v_ecc_current]) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	int hard = type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED, life = counter == NVML_AGGREGATE_ECC;
	*count = g->v[hard ? (life ? v_dbe_aggregate : v_dbe_volatile) : (life ? v_sbe_aggregate : v_sbe_volatile)];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter, nvmlMemoryLocation_t where, unsigned long long *count)
{
	if (where == NVML_MEMORY_LOCATION_DRAM) return nvmlDeviceGetTotalEccErrors(device, type, counter, count);
	FK_GPU(device);
	FK_ARG(count);
	if (!g->v[v_ecc_current] || where != NVML_MEMORY_LOCATION_SRAM) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	*count = type == NVML_MEMORY_ERROR_TYPE_CORRECTED ? g->v[v_sram_corrected] : g->v[v_sram_parity] + g->v[v_sram_secded];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *s)
{
	FK_GPU(device);
	FK_ARG(s);
	if (s->version != nvmlEccSramErrorStatus_v1) return fk_leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	if (!g->v[v_ecc_current]) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	memset(s, 0, sizeof *s);
	s->version = nvmlEccSramErrorStatus_v1;
	s->aggregateCor = s->volatileCor = g->v[v_sram_corrected];
	s->aggregateUncParity = s->volatileUncParity = g->v[v_sram_parity];
	s->aggregateUncSecDed = s->volatileUncSecDed = g->v[v_sram_secded];
	s->aggregateUncBucketL2 = s->aggregateUncParity + s->aggregateUncSecDed;
	s->bThresholdExceeded = g->v[v_sram_threshold];
	return fk_leave(NVML_SUCCESS);
}

// The driver does not tell remapped rows while instances are active.
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable, unsigned int *pending, unsigned int *failure)
{
	FK_GPU(device);
	FK_ARG(correctable && uncorrectable && pending && failure);
	if (fk_active(g)) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	*correctable = g->v[v_remap_correctable];
	*uncorrectable = g->v[v_remap_uncorrectable];
	*pending = g->v[v_remap_pending];
	*failure = g->v[v_remap_failure];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetRemappedRows_v2(nvmlDevice_t device, nvmlRemappedRowsInfo_v2_t *r)
{
	FK_GPU(device);
	FK_ARG(r);
	if (fk_active(g)) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	r->corrActiveRemaps = g->v[v_remap_correctable];
	r->corrInactiveRemaps = g->v[v_remap_correctable_inactive];
	r->uncActiveRemaps = g->v[v_remap_uncorrectable];
	r->uncInactiveRemaps = g->v[v_remap_uncorrectable_inactive];
	r->bPending = g->v[v_remap_pending];
	r->bFailureOccurred = g->v[v_remap_failure];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *h)
{
	FK_GPU(device);
	FK_ARG(h);
	h->max = g->v[v_banks_max];
	h->high = g->v[v_banks_high];
	h->partial = g->v[v_banks_partial];
	h->low = g->v[v_banks_low];
	h->none = g->v[v_banks_none];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetRepairStatus(nvmlDevice_t device, nvmlRepairStatus_t *r)
{
	FK_GPU(device);
	FK_ARG(r);
	if (r->version != nvmlRepairStatus_v1) return fk_leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	r->bChannelRepairPending = g->v[v_channel_repair_pending];
	r->bTpcRepairPending = g->v[v_tpc_repair_pending];
	return fk_leave(NVML_SUCCESS);
}
