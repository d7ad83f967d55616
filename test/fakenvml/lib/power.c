// What is done to a GPU or to the node from outside: reset, reload, reboot.
#define _GNU_SOURCE
#include "fake.h"
#include <stdio.h>
#include <string.h>

// Ampere keeps its MIG mode in the infoROM, and a pending one becomes true here;
// from Hopper on the mode is the driver's and gone. Instances outlive nothing.
static void anew(fk_gpu *g)
{
	memset(g->gi, 0, sizeof g->gi);
	if (g->v[v_resetless]) g->v[v_mig_pending] = 0;
	if (!g->v[v_mig_inert]) g->v[v_mig_current] = g->v[v_mig_pending];
	g->v[v_ecc_current] = g->v[v_ecc_pending];
	g->v[v_sbe_volatile] = g->v[v_dbe_volatile] = 0;
	g->v[v_remap_correctable] += g->v[v_remap_correctable_inactive];
	g->v[v_remap_uncorrectable] += g->v[v_remap_uncorrectable_inactive];
	g->v[v_remap_correctable_inactive] = g->v[v_remap_uncorrectable_inactive] = g->v[v_remap_pending] = 0;
	g->v[v_reset_required] = g->v[v_reset_status] = g->v[v_recovery_action] = 0;
	g->v[v_recovery_action] = g->v[v_recovery_stays];
	g->v[v_channel_repair_pending] = g->v[v_tpc_repair_pending] = 0;
	g->v[v_memory_used_mib] = 0;
}

int fk_reset(int i, char *why, size_t n)
{
	fk_gpu *g = &fk_now()->gpu[i];
	if (g->v[v_lost] || !g->v[v_present]) {
		snprintf(why, n, "Unable to reset GPU %s: the GPU is lost.", g->bus);
		return -1;
	}
	if (g->v[v_virtualization] != NVML_GPU_VIRTUALIZATION_MODE_NONE) {
		snprintf(why, n, "Resetting GPU %s is not supported.", g->bus);
		return -1;
	}
	if (fk_others(i) || g->v[v_persistence]) {
		snprintf(why, n, "GPU %s is currently in use by another client, cannot be reset.", g->bus);
		return -1;
	}
	if (g->v[v_reset_inert]) return 0; // it says yes, and that is all
	anew(&fk_change()->gpu[i]);
	fk_commit();
	return 0;
}

int fk_reload(char *why, size_t n)
{
	for (int i = 0; i < FK_CLIENTS; i++)
		if (fk_map()->client[i].boot == fk_now()->v[n_boot] && fk_map()->client[i].pid && fk_client_alive(i)) {
			snprintf(why, n, "Module nvidia is in use by process %lld", (long long)fk_map()->client[i].pid);
			return -1;
		}
	fk_node *node = fk_change();
	node->v[n_library_mismatch] = 0;
	node->v[n_driver_loaded] = 1;
	for (int i = 0; i < (int)node->gpus; i++)
		if (!node->gpu[i].v[v_lost]) {
			int64_t mig = node->gpu[i].v[v_mig_current], next = node->gpu[i].v[v_mig_pending];
			anew(&node->gpu[i]);
			if (!node->gpu[i].v[v_resetless]) node->gpu[i].v[v_mig_current] = mig, node->gpu[i].v[v_mig_pending] = next;
		}
	fk_commit();
	return 0;
}

// Clients of the boot before hold nothing any more; their handles are dead.
void fk_reboot(void)
{
	fk_node *node = fk_change();
	node->v[n_boot]++;
	node->v[n_driver_loaded] = 1;
	node->v[n_library_mismatch] = 0;
	for (int i = 0; i < (int)node->gpus; i++) {
		node->gpu[i].v[v_lost] = 0;
		node->gpu[i].v[v_persistence] = 0;
		node->gpu[i].v[v_energy_mj] = 0;
		anew(&node->gpu[i]);
	}
	fk_commit();
}
