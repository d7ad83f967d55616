// Field values: many numbers in one call, each with its own answer.
#define _GNU_SOURCE
#include "fake.h"
#include <sys/time.h>

enum { always, with_ecc, not_mig, hopper, ampere_link, hopper_link, blackwell_link };

static const struct {
	unsigned int id;
	int value, when;
	nvmlValueType_t type;
} table[] = {
	{NVML_FI_DEV_ECC_SBE_VOL_TOTAL, v_sbe_volatile, with_ecc, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_ECC_DBE_VOL_TOTAL, v_dbe_volatile, with_ecc, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_ECC_SBE_AGG_TOTAL, v_sbe_aggregate, with_ecc, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_ECC_DBE_AGG_TOTAL, v_dbe_aggregate, with_ecc, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_PERF_POLICY_POWER, v_ns_power_cap, always, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_PERF_POLICY_THERMAL, v_ns_thermal, always, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_MEMORY_TEMP, v_memory_temperature, always, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_NVLINK_LINK_COUNT, v_nvlink_count, always, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_PCIE_REPLAY_COUNTER, v_pcie_replay, always, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_REMAPPED_COR, v_remap_correctable, not_mig, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_REMAPPED_UNC, v_remap_uncorrectable, not_mig, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_REMAPPED_PENDING, v_remap_pending, not_mig, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_REMAPPED_FAILURE, v_remap_failure, not_mig, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, v_nvlink_replay, hopper_link, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY, v_nvlink_recovery, hopper_link, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_NVLINK_ERROR_DL_CRC, v_nvlink_crc, hopper_link, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS, v_pcie_correctable, hopper, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR, v_pcie_nonfatal, hopper, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR, v_pcie_fatal, hopper, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_PCIE_COUNT_LCRC_ERROR, v_pcie_lcrc, hopper, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED, v_resetless, always, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_POWER_INSTANT, v_power_mw, always, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT, v_tlimit_shutdown, hopper, NVML_VALUE_TYPE_SIGNED_INT},
	{NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT, v_tlimit_slowdown, hopper, NVML_VALUE_TYPE_SIGNED_INT},
	{NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT, v_tlimit_mem_max, hopper, NVML_VALUE_TYPE_SIGNED_INT},
	{NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT, v_tlimit_gpu_max, hopper, NVML_VALUE_TYPE_SIGNED_INT},
	{NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, v_nvlink_recovery_failed, blackwell_link, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER, v_nvlink_effective_ber, blackwell_link, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER, v_nvlink_symbol_ber, blackwell_link, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_RESET_STATUS, v_reset_status, always, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, v_recovery_action, always, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, v_ns_sw_thermal, always, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, v_ns_hw_thermal, always, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, v_ns_power_brake, always, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG},
	{NVML_FI_DEV_REMAPPED_ROWS_COR_INACTIVE, v_remap_correctable_inactive, not_mig, NVML_VALUE_TYPE_UNSIGNED_INT},
	{NVML_FI_DEV_REMAPPED_ROWS_UNC_INACTIVE, v_remap_uncorrectable_inactive, not_mig, NVML_VALUE_TYPE_UNSIGNED_INT},
};

static int told(const fk_gpu *g, int when, unsigned int scope)
{
	uint32_t arch = fk_product_find(g->product)->arch;
	switch (when) {
	case with_ecc: return g->v[v_ecc_current] != 0;
	case not_mig: return fk_active(g) == 0;
	case hopper: return arch >= NVML_DEVICE_ARCH_HOPPER;
	case hopper_link: return arch <= NVML_DEVICE_ARCH_HOPPER && scope < g->v[v_nvlink_count];
	case blackwell_link: return arch >= NVML_DEVICE_ARCH_BLACKWELL && scope < g->v[v_nvlink_count];
	}
	return 1;
}

static void answer(const fk_gpu *g, nvmlFieldValue_t *f)
{
	f->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
	f->value.ullVal = 0;
	for (unsigned i = 0; i < sizeof table / sizeof *table; i++) {
		if (table[i].id != f->fieldId) continue;
		if (!told(g, table[i].when, f->scopeId)) return;
		int64_t v = g->v[table[i].value];
		f->valueType = table[i].type;
		if (f->valueType == NVML_VALUE_TYPE_UNSIGNED_LONG_LONG) f->value.ullVal = v;
		else if (f->valueType == NVML_VALUE_TYPE_SIGNED_INT) f->value.siVal = v;
		else f->value.uiVal = v;
		f->nvmlReturn = NVML_SUCCESS;
	}
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	struct timeval t;
	FK_GPU(device);
	FK_ARG(count > 0 && values);
	gettimeofday(&t, NULL);
	for (int i = 0; i < count; i++) {
		values[i].timestamp = t.tv_sec * 1000000ll + t.tv_usec;
		values[i].latencyUsec = 0;
		answer(g, &values[i]);
	}
	return fk_leave(NVML_SUCCESS);
}
