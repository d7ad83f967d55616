// nvidia-smi, as far as it is called: -L, --query-gpu, -pm, --gpu-reset, mig -lgi.
#define _GNU_SOURCE
#include "fake.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int refuse(const char *text)
{
	printf("%s\n", text);
	return 255;
}

// A GPU by index, UUID or PCI address; -1 when there is none.
static int select_gpu(const char *s)
{
	fk_node *n = fk_now();
	char *end;
	long i = strtol(s, &end, 10);
	if (*s && !*end) return fk_nth(n, i);
	for (int j = 0; j < (int)n->gpus; j++)
		if (n->gpu[j].v[v_present] && (!strcmp(s, n->gpu[j].uuid) || !strcasecmp(s, n->gpu[j].bus) || !strcasecmp(s, n->gpu[j].bus + 4))) return j;
	return -1;
}

static int list(void)
{
	fk_node *n = fk_now();
	fk_make_nodes();
	for (int i = 0, r = 0; i < (int)n->gpus; i++) {
		fk_gpu *g = &n->gpu[i];
		if (!g->v[v_present]) continue;
		printf("GPU %d: %s (UUID: %s)\n", r++, fk_product_find(g->product)->name, g->uuid);
		for (int j = 0, d = 0; j < FK_INSTANCES * FK_INSTANCES; j++) {
			fk_gi *gi = &g->gi[j / FK_INSTANCES];
			fk_ci *ci = &gi->ci[j % FK_INSTANCES];
			if (gi->used && ci->used) printf("  MIG %-10s Device %2d: (UUID: %s)\n", fk_profile_at(g, gi->profile)->name, d++, ci->uuid);
		}
	}
	return 0;
}

static const char *mode(int64_t v) { return v ? "Enabled" : "Disabled"; }

static int print_field(const fk_gpu *g, const char *f)
{
	const int64_t *v = g->v;
	if (!strcmp(f, "index")) printf("%d", fk_rank(fk_now(), g->number));
	else if (!strcmp(f, "name") || !strcmp(f, "gpu_name")) printf("%s", fk_product_find(g->product)->name);
	else if (!strcmp(f, "uuid") || !strcmp(f, "gpu_uuid")) printf("%s", g->uuid);
	else if (!strcmp(f, "serial")) printf("%s", g->serial);
	else if (!strcmp(f, "pci.bus_id")) printf("%s", g->bus);
	else if (!strcmp(f, "driver_version")) printf("%s", fk_now()->driver);
	else if (!strcmp(f, "temperature.gpu")) printf("%lld", (long long)v[v_temperature]);
	else if (!strcmp(f, "power.draw")) printf("%.2f W", v[v_power_mw] / 1000.0);
	else if (!strcmp(f, "memory.total")) printf("%lld MiB", (long long)v[v_memory_total_mib]);
	else if (!strcmp(f, "memory.used")) printf("%lld MiB", (long long)v[v_memory_used_mib]);
	else if (!strcmp(f, "mig.mode.current")) printf("%s", mode(v[v_mig_current]));
	else if (!strcmp(f, "mig.mode.pending")) printf("%s", mode(v[v_mig_pending]));
	else if (!strcmp(f, "persistence_mode")) printf("%s", mode(v[v_persistence]));
	else if (!strcmp(f, "ecc.errors.uncorrected.volatile.total")) printf("%lld", (long long)v[v_dbe_volatile]);
	else return -1;
	return 0;
}

static int query(char *fields, int header)
{
	fk_node *n = fk_now();
	if (header) printf("%s\n", fields);
	for (int i = 0; i < (int)n->gpus; i++) {
		if (!n->gpu[i].v[v_present]) continue;
		char *copy = strdup(fields), *save, *sep = "";
		for (char *f = strtok_r(copy, ",", &save); f; f = strtok_r(NULL, ",", &save), sep = ", ") {
			printf("%s", sep);
			if (print_field(&n->gpu[i], f)) {
				printf("Field \"%s\" is not a valid field to query.\n", f);
				return 2;
			}
		}
		free(copy);
		printf("\n");
	}
	return 0;
}

static int instances(void)
{
	fk_node *n = fk_now();
	for (int i = 0; i < (int)n->gpus; i++)
		for (int j = 0; j < FK_INSTANCES; j++) {
			fk_gi *gi = &n->gpu[i].gi[j];
			if (!gi->used) continue;
			const fk_profile *p = fk_profile_at(&n->gpu[i], gi->profile);
			printf("| %3d  MIG %-14s %4u %8u %10u:%u |\n", fk_rank(n, i), p->name, p->id, gi->id, gi->start, gi->size);
		}
	return 0;
}

// Without -i all GPUs are meant; with it a list, as 0,2. The first that can't be
// reset ends it. GPUs of one group, as those on NVLink before Hopper, are reset
// together or not at all.
static int reset(const char *which)
{
	char why[256], *copy = strdup(which ? which : ""), *save = NULL;
	unsigned int want = which ? 0 : ~0u;
	fk_node *n = fk_now();
	for (char *w = strtok_r(copy, ",", &save); w; w = strtok_r(NULL, ",", &save)) {
		int i = select_gpu(w);
		if (i < 0) return refuse("No devices were found");
		want |= 1u << i;
	}
	free(copy);
	for (int i = 0; i < (int)n->gpus; i++)
		for (int j = 0; j < (int)n->gpus; j++)
			if (want >> i & 1 && !(want >> j & 1) && n->gpu[j].v[v_present] && n->gpu[i].v[v_reset_group] && n->gpu[i].v[v_reset_group] == n->gpu[j].v[v_reset_group])
				return refuse("GPUs that are connected by NVLink must be reset together.");
	for (int i = 0; i < (int)fk_now()->gpus; i++) {
		if (!(want >> i & 1) || !fk_now()->gpu[i].v[v_present]) continue;
		if (fk_reset(i, why, sizeof why)) return refuse(why);
		printf("GPU %s was successfully reset.\n", fk_now()->gpu[i].bus);
	}
	printf("All done.\n");
	return 0;
}

// What the fault script says of a reset: before it is begun, of the first GPU that
// is meant. Called without the lock; nonzero: it refuses.
static int fault_reset(const char *which)
{
	char *copy = strdup(which ? which : "0"), *save = NULL, *first = strtok_r(copy, ",", &save);
	fk_fault f;
	fk_lock();
	fk_fault_lookup("nvidia-smi", first ? select_gpu(first) : 0, &f);
	fk_unlock();
	free(copy);
	fk_fault_act(&f);
	return f.ret > 0 ? f.ret : 0;
}

static int persist(const char *which, int on)
{
	int only = which ? select_gpu(which) : -1;
	if (which && only < 0) return refuse("No devices were found");
	fk_node *n = fk_change();
	for (int i = 0; i < (int)n->gpus; i++)
		if (only < 0 || i == only) n->gpu[i].v[v_persistence] = on;
	fk_commit();
	printf("All done.\n");
	return 0;
}

int main(int argc, char **argv)
{
	const char *which = NULL, *pm = NULL;
	char *fields = NULL;
	int header = 1, ls = 0, rs = 0, lgi = 0;
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "-L") || !strcmp(argv[i], "--list-gpus")) ls = 1;
		else if (!strcmp(argv[i], "-r") || !strcmp(argv[i], "--gpu-reset")) rs = 1;
		else if (!strcmp(argv[i], "-i") && i + 1 < argc) which = argv[++i];
		else if (!strncmp(argv[i], "--id=", 5)) which = argv[i] + 5;
		else if (!strcmp(argv[i], "-pm") && i + 1 < argc) pm = argv[++i];
		else if (!strncmp(argv[i], "--query-gpu=", 12)) fields = argv[i] + 12;
		else if (!strncmp(argv[i], "--format=csv", 12)) header = !strstr(argv[i], "noheader");
		else if (!strcmp(argv[i], "mig")) lgi = 1;
		else if (!lgi || strcmp(argv[i], "-lgi")) return refuse("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.");
	}
	if (!fk_map() || !fk_now()->v[n_driver_loaded]) {
		printf("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n");
		return 9;
	}
	if (fk_now()->v[n_library_mismatch]) {
		printf("Failed to initialize NVML: Driver/library version mismatch\n");
		return 18;
	}
	int bad = rs ? fault_reset(which) : 0;
	if (bad) {
		printf("Unable to reset this GPU: Unknown Error\n");
		return bad;
	}
	fk_lock();
	int r = ls ? list() : rs ? reset(which) : pm ? persist(which, atoi(pm)) : fields ? query(fields, header) : lgi ? instances() : refuse("Invalid combination of input arguments.");
	fk_unlock();
	return r;
}
