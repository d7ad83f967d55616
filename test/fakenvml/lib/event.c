// Event sets: each has its own place in the node's row of events and hears of
// the GPUs and kinds that it asked for, from the moment that it asked.
#define _GNU_SOURCE
#include "fake.h"
#include <stdlib.h>
#include <time.h>

typedef struct {
	uint32_t next; // sequence number of the first event not looked at
	uint64_t types[FK_GPUS];
	int asked;
} set;

#define SETS 64
static set *sets[SETS];

static set *of(nvmlEventSet_t s)
{
	for (int i = 0; i < SETS; i++)
		if (sets[i] && (void *)sets[i] == (void *)s.handle) return sets[i];
	return NULL;
}

#define MASK (nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError | nvmlEventTypePState | nvmlEventTypeXidCriticalError | \
	nvmlEventTypeClock | nvmlEventMigConfigChange | nvmlEventTypeSingleBitEccErrorStorm | nvmlEventTypeDramRetirementEvent | \
	nvmlEventTypeDramRetirementFailure | nvmlEventTypeNonFatalPoisonError | nvmlEventTypeFatalPoisonError | \
	nvmlEventTypeGpuUnavailableError | nvmlEventTypeGpuRecoveryAction)

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *s)
{
	nvmlReturn_t r = fk_enter(__func__, NULL, 0, NULL);
	if (r != NVML_SUCCESS) return r;
	FK_ARG(s);
	for (int i = 0; i < SETS; i++) {
		if (sets[i]) continue;
		sets[i] = calloc(1, sizeof(set));
		s->handle = (void *)sets[i];
		return fk_leave(sets[i] ? NVML_SUCCESS : NVML_ERROR_MEMORY);
	}
	return fk_leave(NVML_ERROR_INSUFFICIENT_RESOURCES);
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
	FK_GPU(device);
	FK_ARG(types);
	*types = MASK;
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t s)
{
	FK_GPU(device);
	set *e = of(s);
	FK_ARG(e);
	if (types & ~MASK) return fk_leave(NVML_ERROR_NOT_SUPPORTED);
	if (!e->asked) e->next = fk_map()->sequence;
	e->asked = 1;
	e->types[g->number] |= types;
	return fk_leave(NVML_SUCCESS);
}

static long now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

// The next event that this set asked for. The row is finite: who is more than
// its length behind has lost the oldest.
static int take(set *e, nvmlEventData_t *data)
{
	fk_state *s = fk_map();
	if (!e->asked) return 0;
	if (s->sequence - e->next > FK_EVENTS) e->next = s->sequence - FK_EVENTS;
	while (e->next != s->sequence) {
		fk_event *v = &s->event[e->next++ % FK_EVENTS];
		if (!(e->types[v->gpu] & v->type)) continue;
		data->device.handle = fk_handle_of(fk_a_gpu, v->gpu, 0);
		data->eventType = v->type;
		data->eventData = v->data;
		data->gpuInstanceId = v->gi;
		data->computeInstanceId = v->ci;
		return 1;
	}
	return 0;
}

static nvmlReturn_t wait(const char *call, nvmlEventSet_t s, nvmlEventData_t *data, unsigned int ms)
{
	long end = now_ms() + ms;
	nvmlReturn_t r = fk_enter(call, NULL, 0, NULL);
	if (r != NVML_SUCCESS) return r;
	for (;;) {
		set *e = of(s);
		FK_ARG(e && data);
		if (!fk_me()) return fk_leave(NVML_ERROR_UNINITIALIZED);
		if (take(e, data)) return fk_leave(NVML_SUCCESS);
		if (fk_me()->boot != fk_now()->v[n_boot]) return fk_leave(NVML_ERROR_GPU_IS_LOST);
		uint32_t seen = fk_map()->sequence;
		long left = end - now_ms();
		if (left <= 0) return fk_leave(NVML_ERROR_TIMEOUT);
		fk_unlock();
		fk_wait_event(seen, left);
		fk_lock();
	}
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t s, nvmlEventData_t *data, unsigned int ms) { return wait(__func__, s, data, ms); }
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t s, nvmlEventData_t *data, unsigned int ms) { return wait(__func__, s, data, ms); }

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t s)
{
	nvmlReturn_t r = fk_enter(__func__, NULL, 0, NULL);
	if (r != NVML_SUCCESS) return r;
	for (int i = 0; i < SETS; i++) {
		if (!sets[i] || (void *)sets[i] != (void *)s.handle) continue;
		free(sets[i]);
		sets[i] = NULL;
		return fk_leave(NVML_SUCCESS);
	}
	return fk_leave(NVML_ERROR_INVALID_ARGUMENT);
}
