// Compute instances in GPU instances, and the MIG devices that they are.
#define _GNU_SOURCE
#include "fake.h"
#include <stdio.h>
#include <string.h>

#define FK_GI(instance) \
	fk_gpu *g; \
	nvmlReturn_t r_ = fk_enter(__func__, (instance).handle, FK_K(fk_a_gi), &g); \
	if (r_ != NVML_SUCCESS) return r_; \
	fk_gi *gi = fk_find_gi(g, ((const fk_handle *)(const void *)(instance).handle)->serial); \
	uint32_t slices = fk_profile_at(g, gi->profile)->slices

// Compute slices of a profile; its driver id is its number.
static uint32_t width(uint32_t kind)
{
	static const uint32_t of[] = {1, 2, 3, 4, 7};
	return kind < sizeof of / sizeof *of ? of[kind] : 0;
}

static int offered(uint32_t kind, uint32_t slices) { return width(kind) && width(kind) <= slices; }

// Two and three slices begin at even places and at 0 or 4; four and seven at 0.
static int may_start(uint32_t kind, uint32_t start, uint32_t slices)
{
	static const uint32_t step[] = {1, 2, 4, 8, 8};
	return offered(kind, slices) && start % step[kind] == 0 && start + width(kind) <= slices;
}

static int fits(const fk_gi *gi, uint32_t kind, uint32_t start, uint32_t slices)
{
	if (!may_start(kind, start, slices)) return 0;
	for (int i = 0; i < FK_INSTANCES; i++)
		if (gi->ci[i].used && start < gi->ci[i].start + gi->ci[i].size && gi->ci[i].start < start + width(kind)) return 0;
	return 1;
}

static unsigned int most(uint32_t kind, uint32_t slices)
{
	unsigned int n = 0;
	for (uint32_t s = 0; s < slices; s++) n += may_start(kind, s, slices);
	return n;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned int kind, unsigned int engine, nvmlComputeInstanceProfileInfo_t *info)
{
	FK_GI(instance);
	FK_ARG(info && kind < NVML_COMPUTE_INSTANCE_PROFILE_COUNT && engine < NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT);
	if (!offered(kind, slices)) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	const fk_profile *p = fk_profile_at(g, gi->profile);
	*info = (nvmlComputeInstanceProfileInfo_t){.id = kind, .sliceCount = width(kind), .instanceCount = most(kind, slices),
		.multiprocessorCount = p->sms / slices * width(kind), .sharedCopyEngineCount = p->copies, .sharedDecoderCount = p->decoders,
		.sharedJpegCount = p->jpegs, .sharedOfaCount = p->ofas};
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t instance, unsigned int kind, nvmlComputeInstancePlacement_t *to, unsigned int *count)
{
	FK_GI(instance);
	FK_ARG(count);
	if (!offered(kind, slices)) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	unsigned int n = 0, room = *count;
	for (uint32_t s = 0; s < slices; s++) {
		if (!may_start(kind, s, slices)) continue;
		if (to && n < room) to[n] = (nvmlComputeInstancePlacement_t){s, width(kind)};
		n++;
	}
	*count = n;
	return fk_leave(to && n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t instance, unsigned int kind, unsigned int *count)
{
	FK_GI(instance);
	FK_ARG(count);
	if (!offered(kind, slices)) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	*count = 0;
	for (uint32_t s = 0; s < slices; s++) *count += fits(gi, kind, s, slices);
	return fk_leave(NVML_SUCCESS);
}

// A MIG device's UUID is new each time: whoever kept an old one finds nothing.
static nvmlReturn_t make(fk_gpu *g, fk_gi *gi, uint32_t kind, uint32_t start, nvmlComputeInstance_t *out)
{
	fk_node *n = fk_change();
	fk_gi *to = fk_find_gi(&n->gpu[g->number], gi->serial);
	uint32_t id = 0;
	for (int i = 0; i < FK_INSTANCES; i++) {
		if (!to->ci[i].used || to->ci[i].id != id) continue;
		id++;
		i = -1;
	}
	fk_ci *ci = to->ci;
	while (ci->used) ci++;
	*ci = (fk_ci){.used = 1, .id = id, .kind = kind, .start = start, .size = width(kind), .serial = ++n->v[n_serials]};
	snprintf(ci->uuid, sizeof ci->uuid, "MIG-%08x-%04x-5000-8000-%012llx", g->number + 0x516, gi->id, (unsigned long long)ci->serial);
	out->handle = fk_handle_of(fk_a_ci, g->number, ci->serial);
	fk_commit();
	fk_push((fk_event){.gpu = g->number, .type = nvmlEventMigConfigChange, .gi = gi->id, .ci = id});
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned int kind, nvmlComputeInstance_t *out)
{
	FK_GI(instance);
	FK_ARG(out);
	if (!offered(kind, slices)) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	for (uint32_t s = 0; s < slices; s++)
		if (fits(gi, kind, s, slices)) return make(g, gi, kind, s, out);
	return fk_leave(NVML_ERROR_INSUFFICIENT_RESOURCES);
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t instance, unsigned int kind, const nvmlComputeInstancePlacement_t *at, nvmlComputeInstance_t *out)
{
	FK_GI(instance);
	FK_ARG(out && at);
	if (!offered(kind, slices)) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	FK_ARG(may_start(kind, at->start, slices) && at->size == width(kind));
	if (!fits(gi, kind, at->start, slices)) return fk_leave(NVML_ERROR_INSUFFICIENT_RESOURCES);
	return make(g, gi, kind, at->start, out);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int kind, nvmlComputeInstance_t *out, unsigned int *count)
{
	FK_GI(instance);
	FK_ARG(out && count);
	if (!offered(kind, slices)) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	*count = 0;
	for (int i = 0; i < FK_INSTANCES; i++)
		if (gi->ci[i].used && gi->ci[i].kind == kind) out[(*count)++].handle = fk_handle_of(fk_a_ci, g->number, gi->ci[i].serial);
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int id, nvmlComputeInstance_t *out)
{
	FK_GI(instance);
	FK_ARG(out && slices);
	for (int i = 0; i < FK_INSTANCES; i++)
		if (gi->ci[i].used && gi->ci[i].id == id) {
			out->handle = fk_handle_of(fk_a_ci, g->number, gi->ci[i].serial);
			return fk_leave(NVML_SUCCESS);
		}
	return fk_leave(NVML_ERROR_NOT_FOUND);
}

// A MIG device is a compute instance, seen as a device.
static nvmlReturn_t tell(const char *call, nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info, int mig)
{
	fk_gpu *g;
	fk_gi *gi;
	nvmlReturn_t r = fk_enter(call, instance.handle, FK_K(fk_a_ci), &g);
	if (r != NVML_SUCCESS) return r;
	FK_ARG(info);
	fk_ci *ci = fk_find_ci(g, ((const fk_handle *)(const void *)instance.handle)->serial, &gi);
	info->device.handle = mig ? fk_handle_of(fk_a_mig, g->number, ci->serial) : fk_handle_of(fk_a_gpu, g->number, 0);
	info->gpuInstance.handle = fk_handle_of(fk_a_gi, g->number, gi->serial);
	info->id = ci->id;
	info->profileId = ci->kind;
	info->placement = (nvmlComputeInstancePlacement_t){ci->start, ci->size};
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info) { return tell(__func__, instance, info, 0); }
nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info) { return tell(__func__, instance, info, 1); }

// Someone else computes on it: on exactly this instance, or without saying where.
static int busy(const fk_gpu *g, const fk_gi *gi, const fk_ci *ci)
{
	for (int i = 0; i < FK_CLIENTS; i++) {
		fk_client *c = &fk_map()->client[i];
		if (!(c->compute >> g->number & 1) || c == fk_me() || c->boot != fk_now()->v[n_boot] || !fk_client_alive(i)) continue;
		if (c->gi == ~0u || (c->gi == gi->id && c->ci == ci->id)) return 1;
	}
	return 0;
}

nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t instance)
{
	fk_gpu *g;
	fk_gi *gi;
	nvmlReturn_t r = fk_enter(__func__, instance.handle, FK_K(fk_a_ci), &g);
	if (r != NVML_SUCCESS) return r;
	uint64_t serial = ((const fk_handle *)(const void *)instance.handle)->serial;
	fk_ci *ci = fk_find_ci(g, serial, &gi);
	if (busy(g, gi, ci)) return fk_leave(NVML_ERROR_IN_USE);
	memset(fk_find_ci(&fk_change()->gpu[g->number], serial, NULL), 0, sizeof *ci);
	fk_commit();
	fk_push((fk_event){.gpu = g->number, .type = nvmlEventMigConfigChange, .gi = gi->id, .ci = ci->id});
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *out)
{
	FK_GPU(device);
	FK_ARG(out);
	for (int i = 0; i < FK_INSTANCES * FK_INSTANCES; i++) {
		fk_gi *gi = &g->gi[i / FK_INSTANCES];
		fk_ci *ci = &gi->ci[i % FK_INSTANCES];
		if (!gi->used || !ci->used || index--) continue;
		out->handle = fk_handle_of(fk_a_mig, g->number, ci->serial);
		return fk_leave(NVML_SUCCESS);
	}
	return fk_leave(NVML_ERROR_NOT_FOUND);
}

#define FK_MIG(device) \
	fk_gpu *g; \
	fk_gi *gi; \
	nvmlReturn_t r_ = fk_enter(__func__, (device).handle, FK_K(fk_a_mig), &g); \
	if (r_ != NVML_SUCCESS) return r_; \
	fk_ci *ci = fk_find_ci(g, ((const fk_handle *)(const void *)(device).handle)->serial, &gi); \
	(void)ci

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *out)
{
	FK_MIG(device);
	FK_ARG(out);
	out->handle = fk_handle_of(fk_a_gpu, g->number, 0);
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
	FK_MIG(device);
	FK_ARG(id);
	*id = gi->id;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
	FK_MIG(device);
	FK_ARG(id);
	*id = ci->id;
	return fk_leave(NVML_SUCCESS);
}
