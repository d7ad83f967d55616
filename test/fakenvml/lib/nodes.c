// Files that stand for device nodes, so that who holds a GPU is found as on a real
// node: by what a process has open.
#define _GNU_SOURCE
#include "fake.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int nodes[FK_GPUS]; // descriptors and one; 0: none

static const char *beside(char *to, size_t n, const char *name)
{
	const char *state = fk_path(), *slash = strrchr(state, '/');
	snprintf(to, n, "%.*s%s", slash ? (int)(slash - state + 1) : 0, state, name);
	return to;
}

void fk_open_node(int gpu)
{
	char name[32], path[4096];
	if (nodes[gpu]) return;
	snprintf(name, sizeof name, "dev/nvidia%d", gpu);
	nodes[gpu] = open(beside(path, sizeof path, name), O_RDONLY | O_CLOEXEC) + 1;
}

void fk_close_nodes(void)
{
	for (int i = 0; i < FK_GPUS; i++) {
		if (nodes[i]) close(nodes[i] - 1);
		nodes[i] = 0;
	}
}

static void touch(const char *name)
{
	char path[4096];
	int f = open(beside(path, sizeof path, name), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	if (f >= 0) close(f);
}

// The numbers are laid out as the driver's: a right to each of fifteen GPU
// instances and to eight compute instances in each.
static int minor(int gpu, int gi, int ci) { return 3 + gpu * 135 + gi * 9 + ci + 1; }

static void number_rights(int gpus)
{
	char path[4096];
	FILE *f = fopen(beside(path, sizeof path, "mig-minors"), "we");
	if (!f) return;
	fprintf(f, "config 1\nmonitor 2\n");
	for (int g = 0; g < gpus; g++)
		for (int i = 0; i < 15; i++) {
			fprintf(f, "gpu%d/gi%d/access %d\n", g, i, minor(g, i, -1));
			for (int c = 0; c < 8; c++) fprintf(f, "gpu%d/gi%d/ci%d/access %d\n", g, i, c, minor(g, i, c));
		}
	fclose(f);
}

// What nvidia-smi makes when it lists the GPUs: the nodes that are missing.
void fk_make_nodes(void)
{
	char path[4096], name[64];
	fk_node *n = fk_now();
	if (access(beside(path, sizeof path, "dev"), W_OK)) return;
	if (mkdir(beside(path, sizeof path, "dev/nvidia-caps"), 0755) && errno != EEXIST) return;
	number_rights(n->gpus);
	touch("dev/nvidiactl");
	for (int g = 0; g < (int)n->gpus; g++) {
		snprintf(name, sizeof name, "dev/nvidia%d", g);
		touch(name);
		for (int j = 0; j < FK_INSTANCES * FK_INSTANCES; j++) {
			fk_gi *gi = &n->gpu[g].gi[j / FK_INSTANCES];
			fk_ci *ci = &gi->ci[j % FK_INSTANCES];
			if (!gi->used || !ci->used) continue;
			snprintf(name, sizeof name, "dev/nvidia-caps/nvidia-cap%d", minor(g, gi->id, -1));
			touch(name);
			snprintf(name, sizeof name, "dev/nvidia-caps/nvidia-cap%d", minor(g, gi->id, ci->id));
			touch(name);
		}
	}
}
