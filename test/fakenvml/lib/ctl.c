// fakenvml-state: makes, changes and prints the state of a fake node.
#define _GNU_SOURCE
#include "fake.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FK_NAME(n) #n,
static const char *const names[] = {FK_VALUES(FK_NAME)};
static const char *const node_names[] = {FK_NODE_VALUES(FK_NAME)};

static int fail(const char *what, const char *object)
{
	fprintf(stderr, "%s %s\n", what, object);
	return 1;
}

// Figures of an idle GPU in good health.
static void fresh(fk_gpu *g, const fk_product *p, int i)
{
	int64_t *v = g->v;
	snprintf(g->product, sizeof g->product, "%s", p->key);
	snprintf(g->uuid, sizeof g->uuid, "GPU-%08x-0000-4000-8000-%012x", p->device ^ 0x5eed0000u, i + 1);
	snprintf(g->serial, sizeof g->serial, "16%011u", 50000000u + i);
	g->number = i;
	g->pci_bus = 0x1b + 0x0d * i;
	snprintf(g->bus, sizeof g->bus, "00000000:%02X:00.0", g->pci_bus);
	v[v_present] = v[v_mig_capable] = v[v_ecc_current] = v[v_ecc_pending] = 1;
	v[v_resetless] = p->resetless;
	v[v_temperature] = 34, v[v_memory_temperature] = 42, v[v_margin] = 53;
	v[v_threshold_shutdown] = 92, v[v_threshold_slowdown] = 89, v[v_threshold_mem_max] = 95, v[v_threshold_gpu_max] = 87;
	v[v_tlimit_shutdown] = -8, v[v_tlimit_slowdown] = -2;
	v[v_power_mw] = 70000, v[v_power_limit_mw] = p->power_mw;
	v[v_memory_total_mib] = p->memory_mib;
	v[v_clock_sm] = 345, v[v_clock_memory] = 2619, v[v_clock_reasons] = nvmlClocksEventReasonGpuIdle;
	v[v_banks_max] = 640;
	v[v_pcie_generation] = v[v_pcie_generation_max] = p->arch >= NVML_DEVICE_ARCH_HOPPER ? 5 : 4;
	v[v_pcie_width] = v[v_pcie_width_max] = 16;
	v[v_nvlink_count] = p->links, v[v_nvlink_speed_mbs] = p->link_mbs;
	v[v_inforom_checksum] = 0x4d570000 + i;
	if (p->arch < NVML_DEVICE_ARCH_HOPPER) return; // no fabric to join
	v[v_fabric_state] = NVML_GPU_FABRIC_STATE_COMPLETED;
	v[v_fabric_summary] = NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY;
	v[v_fabric_mask] = 0x21aa; // each sign of ill health answered with no
}

static int create(int n, char **products)
{
	if (n > FK_GPUS) return fail("too many GPUs for", fk_path());
	for (int i = 0; i < n; i++)
		if (!fk_product_find(products[i])) return fail("unknown product", products[i]);
	if (fk_create(fk_path()) || !fk_map()) return fail("create", fk_path());
	fk_lock();
	fk_node *node = fk_change();
	node->gpus = n;
	strcpy(node->driver, "580.95.05");
	strcpy(node->nvml, "13.580.95.05");
	node->v[n_driver_loaded] = node->v[n_boot] = 1;
	node->v[n_cuda] = 13000;
	for (int i = 0; i < n; i++) fresh(&node->gpu[i], fk_product_find(products[i]), i);
	fk_commit();
	fk_unlock();
	return 0;
}

static int assign(fk_node *node, int gpu, char *word)
{
	char *eq = strchr(word, '=');
	if (!eq) return fail("want key=value, not", word);
	*eq++ = 0;
	if (gpu < 0 && !strcmp(word, "driver")) return snprintf(node->driver, sizeof node->driver, "%s", eq) < 0;
	if (gpu < 0 && !strcmp(word, "nvml")) return snprintf(node->nvml, sizeof node->nvml, "%s", eq) < 0;
	int add = eq[0] == '+';
	int64_t n = strtoll(eq + add, NULL, 0), *at = NULL;
	for (int i = 0; gpu >= 0 && i < FK_VALUE_COUNT; i++)
		if (!strcmp(names[i], word)) at = &node->gpu[gpu].v[i];
	for (int i = 0; gpu < 0 && i < FK_NODE_VALUE_COUNT; i++)
		if (!strcmp(node_names[i], word)) at = &node->v[i];
	if (!at) return fail("unknown key", word);
	*at = add ? *at + n : n;
	return 0;
}

// set GPU|node key=value|key=+n...: all of them at once, or none.
static int set(int n, char **words)
{
	if (n < 1) return fail("set wants", "GPU|node key=value...");
	int gpu = strcmp(words[0], "node") ? atoi(words[0]) : -1;
	fk_lock();
	if (gpu >= (int)fk_now()->gpus) return fail("no GPU", words[0]);
	fk_node *node = fk_change();
	for (int i = 1; i < n; i++)
		if (assign(node, gpu, words[i])) return 1;
	fk_commit();
	fk_unlock();
	return 0;
}

static void print_instances(const fk_gpu *g)
{
	const char *sep = "";
	for (int i = 0; i < FK_INSTANCES; i++) {
		const fk_gi *gi = &g->gi[i];
		if (!gi->used) continue;
		printf("%s{\"id\":%u,\"profile\":\"%s\",\"start\":%u,\"size\":%u,\"compute\":[", sep, gi->id, fk_profile_at(g, gi->profile)->name, gi->start, gi->size);
		const char *inner = "";
		for (int j = 0; j < FK_INSTANCES; j++) {
			if (!gi->ci[j].used) continue;
			printf("%s{\"id\":%u,\"start\":%u,\"size\":%u,\"uuid\":\"%s\"}", inner, gi->ci[j].id, gi->ci[j].start, gi->ci[j].size, gi->ci[j].uuid);
			inner = ",";
		}
		printf("]}");
		sep = ",";
	}
}

static int dump(void)
{
	fk_lock();
	fk_node *n = fk_now();
	printf("{\"driver\":\"%s\",\"nvml\":\"%s\",\"values\":{", n->driver, n->nvml);
	for (int i = 0; i < FK_NODE_VALUE_COUNT; i++) printf("%s\"%s\":%lld", i ? "," : "", node_names[i], (long long)n->v[i]);
	printf("},\"gpus\":[");
	for (int i = 0; i < (int)n->gpus; i++) {
		fk_gpu *g = &n->gpu[i];
		printf("%s{\"product\":\"%s\",\"uuid\":\"%s\",\"serial\":\"%s\",\"bus\":\"%s\",\"values\":{", i ? "," : "", g->product, g->uuid, g->serial, g->bus);
		for (int j = 0; j < FK_VALUE_COUNT; j++) printf("%s\"%s\":%lld", j ? "," : "", names[j], (long long)g->v[j]);
		printf("},\"instances\":[");
		print_instances(g);
		printf("]}");
	}
	printf("],\"clients\":[");
	const char *sep = "";
	for (int i = 0; i < FK_CLIENTS; i++) {
		fk_client *c = &fk_map()->client[i];
		if (!c->pid || c->boot != n->v[n_boot] || !fk_client_alive(i)) continue;
		printf("%s{\"pid\":%lld,\"opened\":%u,\"compute\":%u}", sep, (long long)c->pid, c->opened, c->compute);
		sep = ",";
	}
	printf("],\"calls\":{");
	sep = "";
	for (int i = 0; i < FK_CALLS; i++) {
		if (!fk_map()->call[i].count) continue;
		printf("%s\"%s\":%llu", sep, fk_map()->call[i].name, (unsigned long long)fk_map()->call[i].count);
		sep = ",";
	}
	printf("}}\n");
	fk_unlock();
	return 0;
}

// event GPU type data [gi ci]
static int event(int n, char **words)
{
	if (n < 3) return fail("event wants", "GPU type data [gi ci]");
	fk_event e = {.gpu = atoi(words[0]), .type = strtoull(words[1], NULL, 0), .data = strtoull(words[2], NULL, 0), .gi = ~0u, .ci = ~0u};
	if (n == 5) e.gi = atoi(words[3]), e.ci = atoi(words[4]);
	if (e.gpu >= fk_now()->gpus) return fail("no GPU", words[0]);
	fk_lock();
	fk_push(e);
	fk_unlock();
	return 0;
}

// hold GPU [compute [gi ci]]: a process that has the GPU open until it is killed.
static int hold(int n, char **words)
{
	if (n < 1 || atoi(words[0]) >= (int)fk_now()->gpus) return fail("hold wants", "GPU [compute [gi ci]]");
	fk_lock();
	if (fk_client_open()) return fail("no room for a client of", fk_path());
	fk_me()->opened = 1u << atoi(words[0]);
	fk_open_node(atoi(words[0]));
	if (n > 1) fk_me()->compute = fk_me()->opened;
	if (n == 4) fk_me()->gi = atoi(words[2]), fk_me()->ci = atoi(words[3]);
	fk_unlock();
	printf("holding\n");
	fflush(stdout);
	for (;;) pause();
}

static int power(int argc, char **argv)
{
	char why[256] = "";
	int bad = 0;
	fk_lock();
	if (!strcmp(argv[1], "reboot")) fk_reboot();
	else if (!strcmp(argv[1], "reload")) bad = fk_reload(why, sizeof why);
	else if (argc == 3 && atoi(argv[2]) < (int)fk_now()->gpus) bad = fk_reset(atoi(argv[2]), why, sizeof why);
	else bad = 1;
	fk_unlock();
	return bad ? fail(why, "") : 0;
}

static int clear_calls(void)
{
	fk_lock();
	memset(fk_map()->call, 0, sizeof fk_map()->call);
	fk_unlock();
	return 0;
}

int main(int argc, char **argv)
{
	const char *verb = argc > 1 ? argv[1] : "";
	if (!strcmp(verb, "create")) return create(argc - 2, argv + 2);
	if (!fk_map()) return fail("no state at", fk_path());
	if (!strcmp(verb, "set")) return set(argc - 2, argv + 2);
	if (!strcmp(verb, "dump")) return dump();
	if (!strcmp(verb, "event")) return event(argc - 2, argv + 2);
	if (!strcmp(verb, "hold")) return hold(argc - 2, argv + 2);
	if (!strcmp(verb, "clear-calls")) return clear_calls();
	if (!strcmp(verb, "reset") || !strcmp(verb, "reload") || !strcmp(verb, "reboot")) return power(argc, argv);
	return fail("usage: create PRODUCT... | set | event | hold | reset GPU | reload | reboot | clear-calls | dump, not", verb);
}
