// The MIG mode of a GPU: what is set, what is true, and when it becomes so.
#define _GNU_SOURCE
#include "fake.h"

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	FK_GPU(device);
	FK_ARG(current && pending);
	if (!g->v[v_mig_capable]) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	*current = g->v[v_mig_current];
	*pending = g->v[v_mig_pending];
	return fk_leave(NVML_SUCCESS);
}

// The answer says that the mode is stored; *activation says whether it is true.
nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activation)
{
	FK_GPU(device);
	FK_ARG(mode <= 1 && activation);
	if (!g->v[v_mig_capable]) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	if (g->v[v_reset_required]) return fk_leave(NVML_ERROR_RESET_REQUIRED);
	int64_t *v = fk_change()->gpu[g->number].v;
	v[v_mig_pending] = mode;
	*activation = NVML_SUCCESS;
	if (mode != v[v_mig_current]) {
		if (fk_active(g) || fk_others(g->number)) *activation = NVML_ERROR_IN_USE;
		else if (v[v_mig_inert] || (!v[v_resetless] && !v[v_implicit_reset])) *activation = NVML_ERROR_RESET_REQUIRED;
		else v[v_mig_current] = mode;
	}
	fk_commit();
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
	FK_GPU(device);
	FK_ARG(count);
	*count = g->v[v_mig_capable] ? fk_product_find(g->product)->slices : 0;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is)
{
	FK_ANY(device);
	FK_ARG(is);
	*is = ((const fk_handle *)(const void *)device.handle)->kind == fk_a_mig;
	return fk_leave(NVML_SUCCESS);
}
