// GPU instances: what fits where, made and destroyed.
#define _GNU_SOURCE
#include "fake.h"
#include <stdio.h>
#include <string.h>

static int by_id(const fk_gpu *g, unsigned int id)
{
	for (int i = 0; i < fk_profiles(g); i++)
		if (fk_profile_at(g, i)->id == id) return i;
	return -1;
}

static int by_number(const fk_gpu *g, unsigned int number)
{
	for (int i = 0; i < fk_profiles(g); i++)
		if (fk_profile_at(g, i)->number == number) return i;
	return -1;
}

// What a call about instances asks first: MIG capable, MIG on.
static nvmlReturn_t ready(const fk_gpu *g)
{
	if (!g->v[v_mig_capable] || !g->v[v_mig_current]) return NVML_ERROR_NOT_SUPPORTED;
	return g->v[v_reset_required] ? NVML_ERROR_RESET_REQUIRED : NVML_SUCCESS;
}

// Whether one more instance of a profile may lie at start, beside those that are.
static int fits(const fk_gpu *g, int profile, uint32_t start)
{
	const fk_profile *p = fk_profile_at(g, profile);
	uint32_t slices = p->slices, same = 0;
	if (start >= 32 || !(p->starts >> start & 1)) return 0;
	for (int i = 0; i < FK_INSTANCES; i++) {
		const fk_gi *o = &g->gi[i];
		if (!o->used) continue;
		if (start < o->start + o->size && o->start < start + p->size) return 0;
		slices += fk_profile_at(g, o->profile)->slices;
		same += (int)o->profile == profile;
	}
	return same < p->most && slices <= fk_product_find(g->product)->slices;
}

static void tell(const fk_gpu *g, int profile, nvmlGpuInstanceProfileInfo_v2_t *to)
{
	const fk_profile *p = fk_profile_at(g, profile);
	to->id = p->id;
	to->isP2pSupported = 0;
	to->sliceCount = p->slices;
	to->instanceCount = p->most;
	to->multiprocessorCount = p->sms;
	to->copyEngineCount = p->copies;
	to->decoderCount = p->decoders;
	to->encoderCount = 0;
	to->jpegCount = p->jpegs;
	to->ofaCount = p->ofas;
	to->memorySizeMB = p->memory_mib;
	snprintf(to->name, sizeof to->name, "MIG %s", p->name);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int number, nvmlGpuInstanceProfileInfo_t *info)
{
	nvmlGpuInstanceProfileInfo_v2_t v;
	FK_GPU(device);
	FK_ARG(info && number < NVML_GPU_INSTANCE_PROFILE_COUNT);
	int i = by_number(g, number);
	if (!g->v[v_mig_capable] || i < 0) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	tell(g, i, &v);
	*info = (nvmlGpuInstanceProfileInfo_t){v.id, v.isP2pSupported, v.sliceCount, v.instanceCount, v.multiprocessorCount, v.copyEngineCount,
		v.decoderCount, v.encoderCount, v.jpegCount, v.ofaCount, v.memorySizeMB};
	return fk_leave(NVML_SUCCESS);
}

// The caller's structure is of version 2 or 3, which are laid out differently.
static nvmlReturn_t versioned(const fk_gpu *g, int i, nvmlGpuInstanceProfileInfo_v2_t *info)
{
	nvmlGpuInstanceProfileInfo_v2_t v = {0};
	if (!g->v[v_mig_capable] || i < 0) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	tell(g, i, &v);
	if (info->version == nvmlGpuInstanceProfileInfo_v2) {
		v.version = info->version;
		*info = v;
		return fk_leave(NVML_SUCCESS);
	}
	if (info->version != nvmlGpuInstanceProfileInfo_v3) return fk_leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	nvmlGpuInstanceProfileInfo_v3_t *to = (void *)info;
	*to = (nvmlGpuInstanceProfileInfo_v3_t){.version = nvmlGpuInstanceProfileInfo_v3, .id = v.id, .sliceCount = v.sliceCount,
		.instanceCount = v.instanceCount, .multiprocessorCount = v.multiprocessorCount, .copyEngineCount = v.copyEngineCount,
		.decoderCount = v.decoderCount, .jpegCount = v.jpegCount, .ofaCount = v.ofaCount, .memorySizeMB = v.memorySizeMB};
	memcpy(to->name, v.name, sizeof to->name);
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int number, nvmlGpuInstanceProfileInfo_v2_t *info)
{
	FK_GPU(device);
	FK_ARG(info && number < NVML_GPU_INSTANCE_PROFILE_COUNT);
	return versioned(g, by_number(g, number), info);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id, nvmlGpuInstanceProfileInfo_v2_t *info)
{
	FK_GPU(device);
	FK_ARG(info);
	return versioned(g, by_id(g, id), info);
}

static nvmlReturn_t placements(const char *call, nvmlDevice_t device, unsigned int id, nvmlGpuInstancePlacement_t *to, unsigned int *count)
{
	fk_gpu *g;
	nvmlReturn_t r = fk_enter(call, device.handle, FK_K(fk_a_gpu), &g);
	if (r != NVML_SUCCESS) return r;
	FK_ARG(count);
	r = ready(g);
	int i = by_id(g, id);
	if (r != NVML_SUCCESS || i < 0) return fk_leave(r != NVML_SUCCESS ? r : NVML_ERROR_NOT_SUPPORTED);
	const fk_profile *p = fk_profile_at(g, i);
	unsigned int n = 0, room = *count;
	for (uint32_t s = 0; s < 32; s++) {
		if (!(p->starts >> s & 1)) continue;
		if (to && n < room) to[n] = (nvmlGpuInstancePlacement_t){s, p->size};
		n++;
	}
	*count = n;
	return fk_leave(to && n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t d, unsigned int id, nvmlGpuInstancePlacement_t *to, unsigned int *count) { return placements(__func__, d, id, to, count); }
nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t d, unsigned int id, nvmlGpuInstancePlacement_t *to, unsigned int *count) { return placements(__func__, d, id, to, count); }

// How many more of a profile fit, laid from the first free place on.
nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id, unsigned int *count)
{
	FK_GPU(device);
	FK_ARG(count);
	int i = by_id(g, id);
	if (ready(g) != NVML_SUCCESS || i < 0) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	fk_gpu try = *g;
	*count = 0;
	for (uint32_t s = 0; s < 32; s++) {
		if (!fits(&try, i, s)) continue;
		for (int j = 0; j < FK_INSTANCES; j++)
			if (!try.gi[j].used) {
				try.gi[j] = (fk_gi){.used = 1, .profile = i, .start = s, .size = fk_profile_at(g, i)->size};
				break;
			}
		++*count;
	}
	return fk_leave(NVML_SUCCESS);
}

static nvmlReturn_t make(fk_gpu *g, int i, uint32_t start, nvmlGpuInstance_t *out)
{
	const fk_profile *p = fk_profile_at(g, i);
	fk_node *n = fk_change();
	fk_gi *gi = n->gpu[g->number].gi;
	while (gi->used) gi++; // at most one per compute slice: there is room
	*gi = (fk_gi){.used = 1, .profile = i, .start = start, .size = p->size, .serial = ++n->v[n_serials],
		.id = fk_product_find(g->product)->memory_slices / p->size - 1 + start / p->size};
	out->handle = fk_handle_of(fk_a_gi, g->number, gi->serial);
	fk_commit();
	fk_push((fk_event){.gpu = g->number, .type = nvmlEventMigConfigChange, .gi = gi->id, .ci = ~0u});
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int id, const nvmlGpuInstancePlacement_t *at, nvmlGpuInstance_t *out)
{
	FK_GPU(device);
	FK_ARG(at && out);
	nvmlReturn_t r = ready(g);
	int i = by_id(g, id);
	if (r != NVML_SUCCESS) return fk_leave(r);
	if (i < 0) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	FK_ARG(at->start < 32 && fk_profile_at(g, i)->starts >> at->start & 1 && at->size == fk_profile_at(g, i)->size);
	if (!fits(g, i, at->start)) return fk_leave(NVML_ERROR_INSUFFICIENT_RESOURCES);
	return make(g, i, at->start, out);
}

// The driver chooses. Here it takes the first free place, so that a caller who
// leaves it the choice meets layouts that only another order could have made.
nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out)
{
	FK_GPU(device);
	FK_ARG(out);
	nvmlReturn_t r = ready(g);
	int i = by_id(g, id);
	if (r != NVML_SUCCESS) return fk_leave(r);
	if (i < 0) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	for (int s = 0; s < 32; s++)
		if (fits(g, i, s)) return make(g, i, s, out);
	return fk_leave(NVML_ERROR_INSUFFICIENT_RESOURCES);
}

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out, unsigned int *count)
{
	FK_GPU(device);
	FK_ARG(out && count);
	int i = by_id(g, id);
	if (ready(g) != NVML_SUCCESS || i < 0) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	*count = 0;
	for (int j = 0; j < FK_INSTANCES; j++)
		if (g->gi[j].used && (int)g->gi[j].profile == i) out[(*count)++].handle = fk_handle_of(fk_a_gi, g->number, g->gi[j].serial);
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out)
{
	FK_GPU(device);
	FK_ARG(out);
	for (int j = 0; j < FK_INSTANCES; j++)
		if (g->gi[j].used && g->gi[j].id == id) {
			out->handle = fk_handle_of(fk_a_gi, g->number, g->gi[j].serial);
			return fk_leave(NVML_SUCCESS);
		}
	return fk_leave(NVML_ERROR_NOT_FOUND);
}

#define FK_GI(instance) \
	fk_gpu *g; \
	nvmlReturn_t r_ = fk_enter(__func__, (instance).handle, FK_K(fk_a_gi), &g); \
	if (r_ != NVML_SUCCESS) return r_; \
	fk_gi *gi = fk_find_gi(g, ((const fk_handle *)(const void *)(instance).handle)->serial)

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
	FK_GI(instance);
	FK_ARG(info);
	info->device.handle = fk_handle_of(fk_a_gpu, g->number, 0);
	info->id = gi->id;
	info->profileId = fk_profile_at(g, gi->profile)->id;
	info->placement = (nvmlGpuInstancePlacement_t){gi->start, gi->size};
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance)
{
	FK_GI(instance);
	for (int j = 0; j < FK_INSTANCES; j++)
		if (gi->ci[j].used) return fk_leave(NVML_ERROR_IN_USE);
	uint32_t id = gi->id;
	memset(fk_find_gi(&fk_change()->gpu[g->number], gi->serial), 0, sizeof *gi);
	fk_commit();
	fk_push((fk_event){.gpu = g->number, .type = nvmlEventMigConfigChange, .gi = id, .ci = ~0u});
	return fk_leave(NVML_SUCCESS);
}
