// The node, and what a GPU is.
#define _GNU_SOURCE
#include "fake.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *nvmlErrorString(nvmlReturn_t r)
{
	static const char *const words[] = {
		"Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions", "Already Initialized",
		"Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout", "Interrupt Request Issue",
		"NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
		"The operating system has blocked the request.", "RM has detected an NVML/RM version mismatch.", "In use by another client",
		"Insufficient Memory", "No data", "The requested vgpu operation is not available on target device, because ECC is enabled",
		"Insufficient Resources"};
	return (size_t)r < sizeof words / sizeof *words ? words[r] : "Unknown Error";
}

#define NODE \
	nvmlReturn_t r_ = fk_enter(__func__, NULL, 0, NULL); \
	if (r_ != NVML_SUCCESS) return r_; \
	fk_node *n = fk_now()

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	NODE;
	return fk_leave(fk_text(version, length, n->driver));
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	NODE;
	return fk_leave(fk_text(version, length, n->nvml));
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	NODE;
	FK_ARG(version);
	*version = n->v[n_cuda];
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

static nvmlReturn_t counted(const char *call, unsigned int *count)
{
	nvmlReturn_t r = fk_enter(call, NULL, 0, NULL);
	if (r != NVML_SUCCESS) return r;
	FK_ARG(count);
	*count = fk_rank(fk_now(), fk_now()->gpus);
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return counted(__func__, count); }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) { return counted(__func__, count); }

// To get a handle is to open the device: from here on this process holds it.
static nvmlReturn_t open_gpu(int i, nvmlDevice_t *device)
{
	if (i < 0) return fk_leave(NVML_ERROR_NOT_FOUND);
	if (fk_now()->gpu[i].v[v_lost]) return fk_leave(NVML_ERROR_GPU_IS_LOST);
	fk_me()->opened |= 1u << i;
	fk_open_node(i);
	device->handle = fk_handle_of(fk_a_gpu, i, 0);
	return fk_leave(NVML_SUCCESS);
}

static nvmlReturn_t by_index(const char *call, unsigned int index, nvmlDevice_t *device)
{
	nvmlReturn_t r = fk_enter(call, NULL, 0, NULL);
	if (r != NVML_SUCCESS) return r;
	int i = fk_nth(fk_now(), index);
	FK_ARG(device && i >= 0);
	return open_gpu(i, device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) { return by_index(__func__, index, device); }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) { return by_index(__func__, index, device); }

static nvmlReturn_t open_uuid(const char *uuid, nvmlDevice_t *device)
{
	fk_node *n = fk_now();
	for (int i = 0; i < (int)n->gpus; i++) {
		fk_gpu *g = &n->gpu[i];
		if (!g->v[v_present]) continue;
		if (!strcmp(g->uuid, uuid)) return open_gpu(i, device);
		for (int j = 0; j < FK_INSTANCES * FK_INSTANCES; j++) {
			fk_gi *gi = &g->gi[j / FK_INSTANCES];
			fk_ci *ci = &gi->ci[j % FK_INSTANCES];
			if (!gi->used || !ci->used || strcmp(ci->uuid, uuid)) continue;
			fk_me()->opened |= 1u << i;
			fk_open_node(i);
			device->handle = fk_handle_of(fk_a_mig, i, ci->serial);
			return fk_leave(NVML_SUCCESS);
		}
	}
	return fk_leave(NVML_ERROR_NOT_FOUND);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	nvmlReturn_t r = fk_enter(__func__, NULL, 0, NULL);
	if (r != NVML_SUCCESS) return r;
	FK_ARG(uuid && device);
	return open_uuid(uuid, device);
}

static nvmlReturn_t by_bus(const char *call, const char *bus, nvmlDevice_t *device)
{
	unsigned int d = 0, b = 0, s = 0;
	nvmlReturn_t r = fk_enter(call, NULL, 0, NULL);
	if (r != NVML_SUCCESS) return r;
	FK_ARG(bus && device);
	if (sscanf(bus, "%x:%x:%x", &d, &b, &s) != 3) return fk_leave(NVML_ERROR_INVALID_ARGUMENT);
	for (int i = 0; i < (int)fk_now()->gpus; i++)
		if (d == 0 && s == 0 && fk_now()->gpu[i].v[v_present] && fk_now()->gpu[i].pci_bus == b) return open_gpu(i, device);
	return fk_leave(NVML_ERROR_NOT_FOUND);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus, nvmlDevice_t *device) { return by_bus(__func__, bus, device); }
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) { return by_bus(__func__, bus, device); }

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
	FK_ANY(device);
	char text[160];
	const fk_handle *h = (const void *)device.handle;
	snprintf(text, sizeof text, "%s", fk_product_find(g->product)->name);
	if (h->kind == fk_a_mig) {
		fk_gi *gi;
		fk_ci *ci = fk_find_ci(g, h->serial, &gi);
		const fk_profile *p = fk_profile_at(g, gi->profile);
		size_t at = strlen(text);
		if (ci->size == p->slices) snprintf(text + at, sizeof text - at, " MIG %s", p->name);
		else snprintf(text + at, sizeof text - at, " MIG %uc.%s", ci->size, p->name);
	}
	return fk_leave(fk_text(name, length, text));
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
	FK_ANY(device);
	const fk_handle *h = (const void *)device.handle;
	return fk_leave(fk_text(uuid, length, h->kind == fk_a_mig ? fk_find_ci(g, h->serial, NULL)->uuid : g->uuid));
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
	FK_GPU(device);
	return fk_leave(fk_text(serial, length, g->serial));
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
	FK_GPU(device);
	return fk_leave(fk_text(version, length, "96.00.74.00.01"));
}

nvmlReturn_t nvmlDeviceGetInforomImageVersion(nvmlDevice_t device, char *version, unsigned int length)
{
	FK_GPU(device);
	return fk_leave(fk_text(version, length, "G520.0200.00.05"));
}

nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *part, unsigned int length)
{
	char text[32];
	FK_GPU(device);
	snprintf(text, sizeof text, "900-2G%u-0000-000", fk_product_find(g->product)->part);
	return fk_leave(fk_text(part, length, text));
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	FK_GPU(device);
	FK_ARG(index);
	*index = fk_rank(fk_now(), g->number);
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
	FK_GPU(device);
	FK_ARG(minor);
	*minor = g->number;
	return fk_leave(NVML_SUCCESS);
}

static nvmlReturn_t pci_info(const char *call, nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	fk_gpu *g;
	nvmlReturn_t r = fk_enter(call, device.handle, FK_K(fk_a_gpu), &g);
	if (r != NVML_SUCCESS) return r;
	FK_ARG(pci);
	memset(pci, 0, sizeof *pci);
	pci->bus = g->pci_bus;
	pci->pciDeviceId = fk_product_find(g->product)->device;
	pci->pciSubSystemId = 0x16c110de;
	snprintf(pci->busId, sizeof pci->busId, "%s", g->bus);
	snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%s", g->bus + 4);
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci) { return pci_info(__func__, device, pci); }
nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci) { return pci_info(__func__, device, pci); }
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) { return pci_info(__func__, device, pci); }

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *arch)
{
	FK_GPU(device);
	FK_ARG(arch);
	*arch = fk_product_find(g->product)->arch;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand)
{
	FK_GPU(device);
	FK_ARG(brand);
	*brand = NVML_BRAND_NVIDIA;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	FK_GPU(device);
	FK_ARG(major && minor);
	*major = fk_product_find(g->product)->major;
	*minor = fk_product_find(g->product)->minor;
	return fk_leave(NVML_SUCCESS);
}
