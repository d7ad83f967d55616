// How a call begins and ends, and what a handle is.
#define _GNU_SOURCE
#include "fake.h"
#include <pthread.h>
#include <string.h>

#define HANDLES 65536
static fk_handle handles[HANDLES];
static int handle_count, references;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

// Called with the lock held, except on the paths before it.
static void tally(const char *name)
{
	fk_state *s = fk_map();
	uint32_t h = 5381;
	for (const char *c = name; *c; c++) h = h * 33 + (unsigned char)*c;
	for (uint32_t i = 0; i < FK_CALLS; i++) {
		fk_call *k = &s->call[(h + i) % FK_CALLS];
		if (!k->name[0]) strncpy(k->name, name, sizeof k->name - 1);
		if (strcmp(k->name, name)) continue;
		k->count++;
		return;
	}
}

void *fk_handle_of(int kind, int gpu, uint64_t serial)
{
	for (int i = 0; i < handle_count; i++)
		if (handles[i].kind == kind && handles[i].gpu == gpu && handles[i].serial == serial) return &handles[i];
	if (handle_count == HANDLES) return NULL;
	handles[handle_count] = (fk_handle){kind, gpu, serial};
	return &handles[handle_count++];
}

static int ours(const fk_handle *h, int kinds)
{
	if (h < handles || h >= handles + handle_count || ((char *)h - (char *)handles) % sizeof *h) return 0;
	return kinds >> h->kind & 1;
}

fk_gi *fk_find_gi(fk_gpu *g, uint64_t serial)
{
	for (int i = 0; i < FK_INSTANCES; i++)
		if (g->gi[i].used && g->gi[i].serial == serial) return &g->gi[i];
	return NULL;
}

fk_ci *fk_find_ci(fk_gpu *g, uint64_t serial, fk_gi **of)
{
	for (int i = 0; i < FK_INSTANCES; i++)
		for (int j = 0; g->gi[i].used && j < FK_INSTANCES; j++)
			if (g->gi[i].ci[j].used && g->gi[i].ci[j].serial == serial) {
				if (of) *of = &g->gi[i];
				return &g->gi[i].ci[j];
			}
	return NULL;
}

int fk_active(const fk_gpu *g)
{
	int n = 0;
	for (int i = 0; i < FK_INSTANCES; i++) n += g->gi[i].used;
	return n;
}

int fk_nth(const fk_node *n, int rank)
{
	for (int i = 0; i < (int)n->gpus; i++)
		if (n->gpu[i].v[v_present] && rank-- == 0) return i;
	return -1;
}

int fk_rank(const fk_node *n, int number)
{
	int r = 0;
	for (int i = 0; i < number; i++) r += n->gpu[i].v[v_present] != 0;
	return r;
}

static nvmlReturn_t alive(const fk_handle *h, fk_gpu *g)
{
	if (!g->v[v_present] || g->v[v_lost]) return NVML_ERROR_GPU_IS_LOST;
	if (fk_me()->boot != fk_now()->v[n_boot]) return NVML_ERROR_GPU_IS_LOST;
	if (h->kind == fk_a_gi && !fk_find_gi(g, h->serial)) return NVML_ERROR_NOT_FOUND;
	if ((h->kind == fk_a_ci || h->kind == fk_a_mig) && !fk_find_ci(g, h->serial, NULL)) return NVML_ERROR_NOT_FOUND;
	return NVML_SUCCESS;
}

nvmlReturn_t fk_enter(const char *call, const void *handle, int kinds, fk_gpu **g)
{
	fk_fault f;
	const fk_handle *h = handle;
	if (!fk_map()) return NVML_ERROR_UNINITIALIZED;
	fk_lock();
	int ok = !kinds || ours(h, kinds);
	tally(call);
	fk_fault_lookup(call, kinds && ok ? h->gpu : -1, &f);
	if (f.hit) {
		fk_unlock();
		fk_fault_act(&f);
		if (f.ret > 0) return f.ret;
		fk_lock();
	}
	if (!fk_me()) return fk_leave(NVML_ERROR_UNINITIALIZED);
	if (!ok) return fk_leave(NVML_ERROR_INVALID_ARGUMENT);
	if (!kinds) return NVML_SUCCESS;
	fk_gpu *gpu = &fk_now()->gpu[h->gpu];
	nvmlReturn_t r = alive(h, gpu);
	if (r != NVML_SUCCESS) return fk_leave(r);
	if (g) *g = gpu;
	return NVML_SUCCESS;
}

nvmlReturn_t fk_leave(nvmlReturn_t r)
{
	fk_unlock();
	return r;
}

static nvmlReturn_t begin(const char *call)
{
	fk_fault f;
	if (!fk_map()) return NVML_ERROR_DRIVER_NOT_LOADED;
	fk_lock();
	tally(call);
	fk_fault_lookup(call, -1, &f);
	fk_unlock();
	fk_fault_act(&f);
	if (f.ret > 0) return f.ret;
	nvmlReturn_t r = NVML_SUCCESS;
	pthread_mutex_lock(&opening);
	fk_lock();
	if (!fk_now()->v[n_driver_loaded]) r = NVML_ERROR_DRIVER_NOT_LOADED;
	else if (fk_now()->v[n_library_mismatch]) r = NVML_ERROR_LIB_RM_VERSION_MISMATCH;
	else if (!fk_me() && fk_client_open()) r = NVML_ERROR_INSUFFICIENT_RESOURCES;
	if (r == NVML_SUCCESS) references++;
	fk_unlock();
	pthread_mutex_unlock(&opening);
	return r;
}

nvmlReturn_t nvmlInit(void) { return begin(__func__); }
nvmlReturn_t nvmlInit_v2(void) { return begin(__func__); }
nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	(void)flags;
	return begin(__func__);
}

nvmlReturn_t nvmlShutdown(void)
{
	nvmlReturn_t r = fk_enter(__func__, NULL, 0, NULL);
	if (r != NVML_SUCCESS) return r;
	if (--references == 0) fk_client_close();
	return fk_leave(NVML_SUCCESS);
}

nvmlReturn_t fk_text(char *to, unsigned int length, const char *from)
{
	if (!to) return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(from) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(to, from);
	return NVML_SUCCESS;
}
