/* A library that has next to nothing: what the oldest driver has and no more.
 * It proves that a missing function is never called. The file named by BARE
 * says how it misbehaves, a word each. test/fakenvml is the honest one. */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } pci_info;

static int says(const char *word)
{
	const char *path = getenv("BARE");
	char buf[256] = {0}, *w, *save;
	FILE *f = path ? fopen(path, "r") : NULL;
	if (!f) return 0;
	buf[fread(buf, 1, sizeof buf - 1, f)] = 0;
	fclose(f);
	for (w = strtok_r(buf, " \n", &save); w; w = strtok_r(NULL, " \n", &save))
		if (!strcmp(w, word)) return 1;
	return 0;
}

static int fault(const char *at)
{
	char w[64];
	snprintf(w, sizeof w, "hang-%s", at);
	if (says(w)) for (;;) pause();
	snprintf(w, sizeof w, "segv-%s", at);
	if (says(w)) *(volatile int *)8 = 1;
	snprintf(w, sizeof w, "lost-%s", at);
	return says(w) ? 15 : 0;
}

int nvmlInit_v2(void) { return says("mismatch") ? 18 : says("unloaded") ? 9 : fault("init"); }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = says("drop") ? 1 : 2; return fault("count"); }
#ifndef WITHOUT_UUID
int nvmlDeviceGetUUID(void *d, char *s, unsigned n) { snprintf(s, n, "GPU-%ld", (long)d); return 0; }
#endif
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetPciInfo_v3(void *d, pci_info *p)
{
	memset(p, 0, sizeof *p);
	p->bus = 0xc4 + (long)d;
	return 0;
}
int nvmlDeviceGetTemperature(void *d, int kind, unsigned *c) { *c = 40; return fault("temperature"); }
