// One fake node: its GPUs, as a file that all processes map, and the ways in.
#ifndef FAKE_H
#define FAKE_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <stddef.h>
#include <stdint.h>

#define FK_MAGIC 0x66616b656e766d31ull
#define FK_LAYOUT 1
#define FK_GPUS 16
#define FK_CLIENTS 64
#define FK_EVENTS 256
#define FK_RULES 64
#define FK_CALLS 512
#define FK_INSTANCES 8

// Every number of a GPU that can be read and set, by name.
#define FK_VALUES(V) \
	V(present) V(lost) V(reset_required) V(virtualization) V(persistence) V(implicit_reset) V(resetless) V(mig_capable) \
	V(mig_current) V(mig_pending) V(mig_inert) V(reset_group) V(reset_inert) V(recovery_stays) V(temperature) V(memory_temperature) V(margin) \
	V(threshold_shutdown) V(threshold_slowdown) V(threshold_mem_max) V(threshold_gpu_max) \
	V(tlimit_shutdown) V(tlimit_slowdown) V(tlimit_mem_max) V(tlimit_gpu_max) \
	V(power_mw) V(power_limit_mw) V(energy_mj) V(utilization_gpu) V(utilization_memory) V(memory_used_mib) V(memory_total_mib) \
	V(clock_sm) V(clock_memory) V(pstate) V(ecc_current) V(ecc_pending) \
	V(sbe_volatile) V(dbe_volatile) V(sbe_aggregate) V(dbe_aggregate) V(sram_corrected) V(sram_parity) V(sram_secded) V(sram_threshold) \
	V(remap_correctable) V(remap_uncorrectable) V(remap_pending) V(remap_failure) V(remap_correctable_inactive) V(remap_uncorrectable_inactive) \
	V(banks_max) V(banks_high) V(banks_partial) V(banks_low) V(banks_none) \
	V(pcie_generation) V(pcie_generation_max) V(pcie_width) V(pcie_width_max) V(pcie_replay) V(pcie_correctable) V(pcie_nonfatal) V(pcie_fatal) V(pcie_lcrc) \
	V(nvlink_count) V(nvlink_down) V(nvlink_speed_mbs) V(nvlink_crc) V(nvlink_replay) V(nvlink_recovery) V(nvlink_recovery_failed) \
	V(nvlink_effective_ber) V(nvlink_symbol_ber) \
	V(clock_reasons) V(ns_power_cap) V(ns_thermal) V(ns_sw_thermal) V(ns_hw_thermal) V(ns_power_brake) \
	V(recovery_action) V(reset_status) V(channel_repair_pending) V(tpc_repair_pending) \
	V(fabric_state) V(fabric_status) V(fabric_summary) V(fabric_mask) V(fabric_clique) V(inforom_corrupt) V(inforom_checksum)

#define FK_ENUM(n) v_##n,
enum { FK_VALUES(FK_ENUM) FK_VALUE_COUNT };

// And of the node.
#define FK_NODE_VALUES(V) V(driver_loaded) V(library_mismatch) V(cuda) V(boot) V(serials)
#define FK_NODE_ENUM(n) n_##n,
enum { FK_NODE_VALUES(FK_NODE_ENUM) FK_NODE_VALUE_COUNT };

typedef struct {
	uint32_t used, id, kind, start, size, pad; // kind: NVML's compute profile number
	uint64_t serial;                           // never used twice on a node
	char uuid[48];
} fk_ci;

typedef struct {
	uint32_t used, id, profile, start, size, pad; // profile: position in the product's table
	uint64_t serial;
	fk_ci ci[FK_INSTANCES];
} fk_gi;

typedef struct {
	char product[16], uuid[48], serial[32], bus[24];
	uint32_t number, pci_bus;
	int64_t v[FK_VALUE_COUNT];
	fk_gi gi[FK_INSTANCES];
} fk_gpu;

// What a change replaces whole: a process that is killed in the middle of a
// change leaves the old one.
typedef struct {
	uint32_t gpus;
	char driver[32], nvml[32];
	int64_t v[FK_NODE_VALUE_COUNT];
	fk_gpu gpu[FK_GPUS];
} fk_node;

// A client lives as long as its lock on byte FK_LOCKS + its place, which the
// kernel drops with the process: a number is never taken for another's process.
typedef struct {
	int64_t pid;
	uint32_t opened; // GPUs whose device node it holds, as bits
	uint32_t compute; // of these, where it runs a computation
	uint32_t gi, ci; // the instance it computes on
	int64_t boot;
} fk_client;

typedef struct {
	uint64_t type, data;
	uint32_t gpu, gi, ci, pad;
} fk_event;

typedef struct {
	char name[88];
	uint64_t count;
} fk_call;

typedef struct {
	uint64_t magic;
	uint32_t layout, active; // active: which of node[2] is true
	fk_node node[2];
	fk_client client[FK_CLIENTS];
	uint32_t sequence, pad; // of events; a futex
	fk_event event[FK_EVENTS];
	uint64_t rules_seen[3];
	uint64_t rule_hits[FK_RULES];
	fk_call call[FK_CALLS];
} fk_state;

#define FK_LOCKS ((off_t)1 << 40)

// A profile of GPU instances of a product.
typedef struct {
	const char *name;
	uint32_t number, id, slices, size, most; // number: NVML's; id: the driver's
	uint32_t starts; // where it may begin, as bits over memory slices
	uint32_t sms, memory_mib, copies, decoders, jpegs, ofas;
} fk_profile;

typedef struct {
	const char *key, *name;
	uint32_t arch, major, minor, device, memory_mib, slices, memory_slices;
	uint32_t links, link_mbs, resetless, power_mw, part;
	const fk_profile *profiles;
} fk_product;

// product.c
const fk_product *fk_product_find(const char *key);
const fk_product *fk_product_at(int i);
int fk_profiles(const fk_gpu *g);
const fk_profile *fk_profile_at(const fk_gpu *g, int i);

// state.c
fk_state *fk_map(void);
const char *fk_path(void);
int fk_create(const char *path);
void fk_lock(void);
void fk_unlock(void);
fk_node *fk_now(void);    // what is true; do not write
fk_node *fk_change(void); // a copy to write into
void fk_commit(void);     // the copy is true from here on
int fk_client_alive(int i);
int fk_client_open(void); // takes a place for this process
void fk_client_close(void);
fk_client *fk_me(void);
int fk_others(int gpu); // living clients other than this one that hold the GPU
void fk_push(fk_event e);
void fk_wait_event(uint32_t seen, long ms);

// fault.c
typedef struct {
	int hit, ret;
	int64_t sleep_us; // -1: for ever
	int crash;        // -1: none; a signal, or 256 + an exit status
} fk_fault;
void fk_fault_lookup(const char *call, int gpu, fk_fault *f);
void fk_fault_act(const fk_fault *f);

// call.c: how every function begins and ends. fk_enter returns with the lock
// held when it returns NVML_SUCCESS.
enum { fk_a_gpu = 1, fk_a_gi, fk_a_ci, fk_a_mig };
typedef struct fk_handle {
	int kind, gpu;
	uint64_t serial;
} fk_handle;
nvmlReturn_t fk_enter(const char *call, const void *handle, int kinds, fk_gpu **g);
nvmlReturn_t fk_leave(nvmlReturn_t r);
void *fk_handle_of(int kind, int gpu, uint64_t serial);
fk_gi *fk_find_gi(fk_gpu *g, uint64_t serial);
fk_ci *fk_find_ci(fk_gpu *g, uint64_t serial, fk_gi **of);
int fk_active(const fk_gpu *g); // GPU instances
int fk_rank(const fk_node *n, int number);
int fk_nth(const fk_node *n, int rank);
nvmlReturn_t fk_text(char *to, unsigned int length, const char *from);

#define FK_K(kind) (1 << (kind))
#define FK_GPU(dev) \
	fk_gpu *g; \
	nvmlReturn_t r_ = fk_enter(__func__, (dev).handle, FK_K(fk_a_gpu), &g); \
	if (r_ != NVML_SUCCESS) return r_
#define FK_ANY(dev) \
	fk_gpu *g; \
	nvmlReturn_t r_ = fk_enter(__func__, (dev).handle, FK_K(fk_a_gpu) | FK_K(fk_a_mig), &g); \
	if (r_ != NVML_SUCCESS) return r_
#define FK_ARG(ok) \
	do { \
		if (!(ok)) return fk_leave(NVML_ERROR_INVALID_ARGUMENT); \
	} while (0)

// nodes.c: files that stand for the device nodes, in dev/ beside the state file,
// if that is there. Who opens a GPU has its file open.
void fk_open_node(int gpu);
void fk_close_nodes(void);
void fk_make_nodes(void);

// power.c: what is done to a GPU or to the node from outside of NVML.
int fk_reset(int gpu, char *why, size_t n);
int fk_reload(char *why, size_t n);
void fk_reboot(void);
#endif
