// The fault script: lines of key=value in <state>.faults, read again when the
// file changes. How often a rule was met is counted for the node, not for the
// process: a client that is started again goes on where the last one was.
#define _GNU_SOURCE
#include "fake.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct {
	char call[88];
	int gpu, ret, crash;
	int64_t after, times, sleep_us;
} rule;

static rule rules[FK_RULES];
static int count;
static uint64_t read_of[3];

static int64_t duration(const char *s)
{
	char *end;
	if (!strcmp(s, "inf")) return -1;
	double n = strtod(s, &end);
	if (!strcmp(end, "us")) return n;
	if (!strcmp(end, "ms")) return n * 1000;
	return n * 1000000;
}

static void parse(char *line)
{
	rule r = {.call = "*", .gpu = -1, .ret = -1, .crash = -1, .times = -1};
	char *save, *word = strtok_r(line, " \t\n", &save);
	if (!word || *word == '#' || count == FK_RULES) return;
	for (; word; word = strtok_r(NULL, " \t\n", &save)) {
		char *eq = strchr(word, '=');
		if (!eq) continue;
		*eq++ = 0;
		if (!strcmp(word, "call")) snprintf(r.call, sizeof r.call, "%s", eq);
		if (!strcmp(word, "gpu")) r.gpu = atoi(eq);
		if (!strcmp(word, "ret")) r.ret = atoi(eq);
		if (!strcmp(word, "after")) r.after = atoll(eq);
		if (!strcmp(word, "times")) r.times = atoll(eq);
		if (!strcmp(word, "sleep") || !strcmp(word, "latency")) r.sleep_us = duration(eq);
		if (!strcmp(word, "signal")) r.crash = atoi(eq);
		if (!strcmp(word, "exit")) r.crash = 256 + atoi(eq);
	}
	rules[count++] = r;
}

static void load(const char *path)
{
	char *line = NULL;
	size_t n = 0;
	FILE *f = fopen(path, "re");
	count = 0;
	if (!f) return;
	while (getline(&line, &n, f) >= 0) parse(line);
	free(line);
	fclose(f);
}

static void refresh(fk_state *s)
{
	char path[4096];
	struct stat st;
	uint64_t at[3] = {0};
	snprintf(path, sizeof path, "%s.faults", fk_path());
	if (!stat(path, &st)) {
		at[0] = st.st_ino, at[1] = st.st_size;
		at[2] = st.st_mtim.tv_sec * 1000000000ull + st.st_mtim.tv_nsec;
	}
	if (memcmp(at, read_of, sizeof at)) {
		load(path);
		memcpy(read_of, at, sizeof at);
	}
	if (memcmp(at, s->rules_seen, sizeof at)) {
		memset(s->rule_hits, 0, sizeof s->rule_hits);
		memcpy(s->rules_seen, at, sizeof at);
	}
}

// Called with the lock held. Latencies add up; the first answer or end counts.
void fk_fault_lookup(const char *call, int gpu, fk_fault *f)
{
	fk_state *s = fk_map();
	*f = (fk_fault){.ret = -1, .crash = -1};
	refresh(s);
	for (int i = 0; i < count; i++) {
		rule *r = &rules[i];
		size_t n = strlen(r->call);
		int any = n && r->call[n - 1] == '*';
		if (any ? strncmp(r->call, call, n - 1) : strcmp(r->call, call)) continue;
		if (r->gpu >= 0 && r->gpu != gpu) continue;
		int64_t met = s->rule_hits[i]++;
		if (met < r->after || (r->times >= 0 && met >= r->after + r->times)) continue;
		f->hit = 1;
		if (r->sleep_us < 0 || f->sleep_us < 0) f->sleep_us = -1;
		else f->sleep_us += r->sleep_us;
		if (f->ret < 0) f->ret = r->ret;
		if (f->crash < 0) f->crash = r->crash;
	}
}

// Called without the lock: a call that hangs keeps no one else.
void fk_fault_act(const fk_fault *f)
{
	while (f->sleep_us < 0) pause();
	if (f->sleep_us > 0) {
		struct timespec t = {f->sleep_us / 1000000, f->sleep_us % 1000000 * 1000};
		while (nanosleep(&t, &t)) {
		}
	}
	if (f->crash >= 256) _exit(f->crash - 256);
	if (f->crash >= 0) {
		signal(f->crash, SIG_DFL);
		raise(f->crash);
	}
}
