// The state file: mapped by every process, changed under one lock.
#define _GNU_SOURCE
#include "fake.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;
static fk_state *state;
static int fd = -1, lives = -1; // two descriptions: flock for changes, a record lock for life
static int place = -1;
static pid_t owner;

const char *fk_path(void)
{
	const char *p = getenv("FAKENVML_STATE");
	return p && *p ? p : "/run/fakenvml/state";
}

int fk_create(const char *path)
{
	int f = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (f < 0) return -1;
	if (fchmod(f, 0666) || ftruncate(f, sizeof(fk_state))) return -1;
	fk_state *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
	close(f);
	if (s == MAP_FAILED) return -1;
	s->layout = FK_LAYOUT;
	s->magic = FK_MAGIC;
	return munmap(s, sizeof *s);
}

static fk_state *map(void)
{
	struct stat st;
	int f = open(fk_path(), O_RDWR | O_CLOEXEC), l = open(fk_path(), O_RDWR | O_CLOEXEC);
	if (f < 0 || l < 0 || fstat(f, &st) || st.st_size != sizeof(fk_state)) goto no;
	fk_state *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
	if (s == MAP_FAILED) goto no;
	if (s->magic == FK_MAGIC && s->layout == FK_LAYOUT) {
		fd = f, lives = l;
		return s;
	}
	munmap(s, sizeof *s);
no:
	if (f >= 0) close(f);
	if (l >= 0) close(l);
	return NULL;
}

fk_state *fk_map(void)
{
	fk_state *s = __atomic_load_n(&state, __ATOMIC_ACQUIRE);
	if (s) return s; // also for those who hold the lock
	pthread_mutex_lock(&threads);
	if (!state) __atomic_store_n(&state, map(), __ATOMIC_RELEASE);
	pthread_mutex_unlock(&threads);
	return state;
}

void fk_lock(void)
{
	pthread_mutex_lock(&threads);
	while (flock(fd, LOCK_EX) && errno == EINTR) {
	}
}

void fk_unlock(void)
{
	flock(fd, LOCK_UN);
	pthread_mutex_unlock(&threads);
}

fk_node *fk_now(void) { return &state->node[state->active]; }

fk_node *fk_change(void)
{
	state->node[1 - state->active] = state->node[state->active];
	return &state->node[1 - state->active];
}

void fk_commit(void) { __atomic_store_n(&state->active, 1 - state->active, __ATOMIC_SEQ_CST); }

static struct flock life(int i, short type)
{
	return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = FK_LOCKS + i, .l_len = 1};
}

// A lock of our own description does not stand in our own way: ask by place.
int fk_client_alive(int i)
{
	struct flock l = life(i, F_WRLCK);
	if (i == place && owner == getpid()) return 1;
	return !fcntl(lives, F_OFD_GETLK, &l) && l.l_type != F_UNLCK;
}

int fk_client_open(void)
{
	for (int i = 0; i < FK_CLIENTS; i++) {
		struct flock l = life(i, F_WRLCK);
		if (fcntl(lives, F_OFD_SETLK, &l)) continue;
		place = i, owner = getpid();
		state->client[i] = (fk_client){.pid = owner, .boot = fk_now()->v[n_boot], .gi = ~0u, .ci = ~0u};
		return 0;
	}
	return -1;
}

void fk_client_close(void)
{
	if (place < 0) return;
	fk_close_nodes();
	struct flock l = life(place, F_UNLCK);
	memset(&state->client[place], 0, sizeof(fk_client));
	fcntl(lives, F_OFD_SETLK, &l);
	place = -1;
}

fk_client *fk_me(void) { return place < 0 ? NULL : &state->client[place]; }

int fk_others(int gpu)
{
	int n = 0;
	for (int i = 0; i < FK_CLIENTS; i++)
		if (i != place && (state->client[i].opened >> gpu & 1) && state->client[i].boot == fk_now()->v[n_boot] && fk_client_alive(i)) n++;
	return n;
}

void fk_push(fk_event e)
{
	state->event[state->sequence % FK_EVENTS] = e;
	__atomic_add_fetch(&state->sequence, 1, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, &state->sequence, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

void fk_wait_event(uint32_t seen, long ms)
{
	struct timespec t = {ms / 1000, ms % 1000 * 1000000};
	syscall(SYS_futex, &state->sequence, FUTEX_WAIT, seen, &t, NULL, 0);
}
