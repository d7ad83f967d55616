// The products: names and figures as their drivers report them. Profile ids are
// the driver's (`nvidia-smi mig -lgip`), which are not NVML's profile numbers.
#include "fake.h"
#include <string.h>

#define ALL7 0x7f
#define EVEN4 0x55
#define EVEN3 0x15
#define HALVES 0x11

// Seven compute slices over eight memory slices, for one memory class.
#define SEVEN(tag, n1, n1d, n2, n3, n4, n7, m1, m2, m4, m8, s1, s1d, s2, s3, s4, s7) \
	static const fk_profile tag[] = { \
		{n1, NVML_GPU_INSTANCE_PROFILE_1_SLICE, 19, 1, 1, 7, ALL7, s1, m1, 1, 0, 0, 0}, \
		{n1 "+me", NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1, 20, 1, 1, 1, ALL7, s1, m1, 1, 1, 1, 1}, \
		{n1d, NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2, 15, 1, 2, 4, EVEN4, s1d, m2, 1, 1, 0, 0}, \
		{n2, NVML_GPU_INSTANCE_PROFILE_2_SLICE, 14, 2, 2, 3, EVEN3, s2, m2, 2, 1, 0, 0}, \
		{n3, NVML_GPU_INSTANCE_PROFILE_3_SLICE, 9, 3, 4, 2, HALVES, s3, m4, 3, 2, 0, 0}, \
		{n4, NVML_GPU_INSTANCE_PROFILE_4_SLICE, 5, 4, 4, 1, 1, s4, m4, 4, 2, 0, 0}, \
		{n7, NVML_GPU_INSTANCE_PROFILE_7_SLICE, 0, 7, 8, 1, 1, s7, m8, 7, 5, 1, 1}, \
		{0}}

SEVEN(a100_40, "1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb", 4864, 9856, 19968, 40192, 14, 14, 28, 42, 56, 98);
SEVEN(a100_80, "1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", 9728, 19968, 40192, 80896, 14, 14, 28, 42, 56, 98);
SEVEN(h100_80, "1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", 9984, 20096, 40448, 81152, 16, 26, 32, 60, 64, 132);
SEVEN(h200_141, "1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb", 16768, 33280, 71296, 143104, 16, 26, 32, 60, 64, 132);
SEVEN(b200_180, "1g.23gb", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb", 22016, 44544, 90112, 182272, 18, 30, 36, 70, 72, 148);
SEVEN(gh200_96, "1g.12gb", "1g.24gb", "2g.24gb", "3g.48gb", "4g.48gb", "7g.96gb", 11136, 23552, 47488, 96128, 16, 26, 32, 60, 64, 132);

static const fk_profile a30_24[] = {
	{"1g.6gb", NVML_GPU_INSTANCE_PROFILE_1_SLICE, 14, 1, 1, 4, 0xf, 14, 5952, 1, 0, 0, 0},
	{"1g.6gb+me", NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1, 21, 1, 1, 1, 0xf, 14, 5952, 1, 1, 1, 1},
	{"2g.12gb", NVML_GPU_INSTANCE_PROFILE_2_SLICE, 5, 2, 2, 2, 0x5, 28, 12032, 2, 2, 0, 0},
	{"2g.12gb+me", NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1, 6, 2, 2, 1, 0x5, 28, 12032, 2, 2, 1, 1},
	{"4g.24gb", NVML_GPU_INSTANCE_PROFILE_4_SLICE, 0, 4, 4, 1, 1, 56, 24192, 4, 4, 1, 1},
	{0}};

static const fk_product products[] = {
	{"A30", "NVIDIA A30", NVML_DEVICE_ARCH_AMPERE, 8, 0, 0x20b710de, 24576, 4, 4, 4, 50000, 0, 165000, 1001, a30_24},
	{"A100-40", "NVIDIA A100-SXM4-40GB", NVML_DEVICE_ARCH_AMPERE, 8, 0, 0x20b010de, 40960, 7, 8, 12, 25781, 0, 400000, 506, a100_40},
	{"A100-80", "NVIDIA A100-SXM4-80GB", NVML_DEVICE_ARCH_AMPERE, 8, 0, 0x20b210de, 81920, 7, 8, 12, 25781, 0, 400000, 506, a100_80},
	{"H100", "NVIDIA H100 80GB HBM3", NVML_DEVICE_ARCH_HOPPER, 9, 0, 0x233010de, 81559, 7, 8, 18, 26562, 1, 700000, 520, h100_80},
	{"H200", "NVIDIA H200", NVML_DEVICE_ARCH_HOPPER, 9, 0, 0x233510de, 143771, 7, 8, 18, 26562, 1, 700000, 520, h200_141},
	{"B200", "NVIDIA B200", NVML_DEVICE_ARCH_BLACKWELL, 10, 0, 0x290110de, 183359, 7, 8, 18, 53125, 1, 1000000, 525, b200_180},
	{"GH200", "NVIDIA GH200 480GB", NVML_DEVICE_ARCH_HOPPER, 9, 0, 0x234210de, 97871, 7, 8, 18, 26562, 1, 900000, 530, gh200_96},
};

const fk_product *fk_product_at(int i)
{
	return i >= 0 && i < (int)(sizeof products / sizeof *products) ? &products[i] : NULL;
}

const fk_product *fk_product_find(const char *key)
{
	for (int i = 0; fk_product_at(i); i++)
		if (!strcmp(products[i].key, key)) return &products[i];
	return NULL;
}

int fk_profiles(const fk_gpu *g)
{
	int n = 0;
	for (const fk_profile *p = fk_product_find(g->product)->profiles; p->name; p++) n++;
	return n;
}

const fk_profile *fk_profile_at(const fk_gpu *g, int i) { return &fk_product_find(g->product)->profiles[i]; }
