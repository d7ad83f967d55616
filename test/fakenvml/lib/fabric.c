// NVLink, the fabric behind it, and who computes.
#define _GNU_SOURCE
#include "fake.h"
#include <stdio.h>
#include <string.h>

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active)
{
	FK_GPU(device);
	FK_ARG(active && link < g->v[v_nvlink_count]);
	*active = g->v[v_nvlink_down] >> link & 1 ? NVML_FEATURE_DISABLED : NVML_FEATURE_ENABLED;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, nvmlIntNvLinkDeviceType_t *type)
{
	FK_GPU(device);
	FK_ARG(type && link < g->v[v_nvlink_count]);
	*type = NVML_NVLINK_DEVICE_TYPE_SWITCH;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version)
{
	FK_GPU(device);
	uint32_t arch = fk_product_find(g->product)->arch;
	FK_ARG(version && link < g->v[v_nvlink_count]);
	*version = arch < NVML_DEVICE_ARCH_HOPPER ? NVML_NVLINK_VERSION_3_1 : arch == NVML_DEVICE_ARCH_HOPPER ? NVML_NVLINK_VERSION_4_0 : NVML_NVLINK_VERSION_5_0;
	return fk_leave(NVML_SUCCESS);
}

// The links go to four switches, in turn.
static nvmlReturn_t remote(const char *call, nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
	fk_gpu *g;
	nvmlReturn_t r = fk_enter(call, device.handle, FK_K(fk_a_gpu), &g);
	if (r != NVML_SUCCESS) return r;
	FK_ARG(pci && link < g->v[v_nvlink_count]);
	*pci = (nvmlPciInfo_t){.bus = 0xe0 + link % 4, .pciDeviceId = 0x22a310de};
	snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus);
	snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", pci->bus);
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci) { return remote(__func__, device, link, pci); }
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci) { return remote(__func__, device, link, pci); }

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link, nvmlNvLinkErrorCounter_t counter, unsigned long long *count)
{
	FK_GPU(device);
	FK_ARG(count && link < g->v[v_nvlink_count]);
	int at = counter == NVML_NVLINK_ERROR_DL_REPLAY ? v_nvlink_replay
		: counter == NVML_NVLINK_ERROR_DL_RECOVERY ? v_nvlink_recovery
		: counter == NVML_NVLINK_ERROR_DL_CRC_FLIT ? v_nvlink_crc : -1;
	if (at < 0) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	*count = g->v[at];
	return fk_leave(NVML_SUCCESS);
}

static const unsigned char cluster[NVML_GPU_FABRIC_UUID_LEN] = {0x4d, 0x57};

nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *f)
{
	FK_GPU(device);
	FK_ARG(f);
	memcpy(f->clusterUuid, cluster, sizeof cluster);
	f->status = g->v[v_fabric_status];
	f->cliqueId = g->v[v_fabric_clique];
	f->state = g->v[v_fabric_state];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *f)
{
	FK_GPU(device);
	FK_ARG(f);
	if (f->version != nvmlGpuFabricInfo_v2 && f->version != nvmlGpuFabricInfo_v3) return fk_leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	memcpy(f->clusterUuid, cluster, sizeof cluster);
	f->status = g->v[v_fabric_status];
	f->cliqueId = g->v[v_fabric_clique];
	f->state = g->v[v_fabric_state];
	f->healthMask = g->v[v_fabric_mask];
	if (f->version == nvmlGpuFabricInfo_v3) ((nvmlGpuFabricInfo_v3_t *)f)->healthSummary = g->v[v_fabric_summary];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t other, nvmlGpuP2PCapsIndex_t index, nvmlGpuP2PStatus_t *status)
{
	FK_GPU(device);
	const fk_handle *h = (const void *)other.handle;
	(void)index;
	FK_ARG(status && h && h->kind == fk_a_gpu);
	*status = g->v[v_nvlink_count] && fk_now()->gpu[h->gpu].v[v_nvlink_count] ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other, nvmlGpuTopologyLevel_t *level)
{
	FK_GPU(device);
	const fk_handle *h = (const void *)other.handle;
	FK_ARG(level && h && h->kind == fk_a_gpu);
	*level = h->gpu == (int)g->number ? NVML_TOPOLOGY_INTERNAL : h->gpu / 4 == (int)g->number / 4 ? NVML_TOPOLOGY_NODE : NVML_TOPOLOGY_SYSTEM;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
	FK_GPU(device);
	FK_ARG(count);
	unsigned int n = 0, room = *count;
	for (int i = 0; i < FK_CLIENTS; i++) {
		fk_client *c = &fk_map()->client[i];
		if (!(c->compute >> g->number & 1) || !fk_client_alive(i)) continue;
		if (n < room && infos) infos[n] = (nvmlProcessInfo_t){.pid = c->pid, .usedGpuMemory = 512ull << 20, .gpuInstanceId = c->gi, .computeInstanceId = c->ci};
		n++;
	}
	*count = n;
	return fk_leave(n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS);
}
