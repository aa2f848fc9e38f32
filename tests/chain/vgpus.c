/* Stand-in for libnvidia-ml.so.1 of a vGPU host: a board of vGPUs, and what the macros say is wrong. Types as in nvml.h. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define A10 1
#define A100 2
#define L40S 3
#define H100 4
#ifndef BOARD
#define BOARD A10
#endif
#ifndef LOST
#define LOST -1 /* index of a GPU that has fallen off the bus */
#endif
#ifndef HANGS
#define HANGS 0 /* questions about types do not come back */
#endif

#ifndef LATER
#define LATER 0 /* another MIG mode comes with a reset only */
#endif
#ifndef MISMATCH
#define MISMATCH 0 /* the module is of another version */
#endif

enum { OK, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, SIZE = 7, GPU_LOST = 15, VERSION_MISMATCH = 18, IN_USE = 19, NO_ROOM = 23 };

struct type { unsigned id; const char *name; unsigned long long megabytes; unsigned most; };
#if BOARD == A10
static const struct type types[] = { { 592, "NVIDIA A10-4Q", 4096, 6 }, { 594, "NVIDIA A10-8Q", 8192, 3 } };
enum { MIG = -1, HETEROGENEOUS = -1, GPUS = 2 };
#elif BOARD == A100
static const struct type types[] = { { 474, "NVIDIA A100-1-5C", 4864, 7 }, { 475, "NVIDIA A100-2-10C", 9856, 3 } };
enum { MIG = 1, HETEROGENEOUS = -1, GPUS = 1 };
#elif BOARD == L40S
static const struct type types[] = { { 1155, "NVIDIA L40S-24Q", 24576, 2 }, { 1156, "NVIDIA L40S-48Q", 49152, 1 } };
enum { MIG = -1, HETEROGENEOUS = 1, GPUS = 1 };
#else
static const struct type types[] = { { 826, "NVIDIA H100-40C", 40960, 2 }, { 828, "NVIDIA H100-1-10C", 10240, 7 }, { 829, "NVIDIA H100-2-20C", 20480, 3 } };
enum { MIG = 0, HETEROGENEOUS = 0, GPUS = 1 };
#define MIGS 1 /* its mode and instances are kept in a file, for the next process */
#endif
#define TYPES (sizeof types / sizeof *types)

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
struct heterogeneous { unsigned version, mode; };
static long index_of(void *device) { return (long)device - 1; }
#include "mig.c"

int nvmlInit_v2(void) { return MISMATCH ? VERSION_MISMATCH : OK; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == GPU_LOST ? "GPU is lost" : "error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "595.91.07"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(unsigned long)(index + 1); return OK; }
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci) {
	memset(pci, 0, sizeof *pci);
	snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", (unsigned)(0x3b + index_of(device)));
	snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", (unsigned)(0x3b + index_of(device)));
	return OK;
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *then) {
	if (index_of(device) == LOST) return GPU_LOST;
	*now = *then = MIG == 1;
	mode(now, then);
	return MIG < 0 ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetEccMode(void *device, unsigned *now, unsigned *then) { (void)device; *now = *then = 1; return OK; }
int nvmlDeviceGetVgpuHeterogeneousMode(void *device, struct heterogeneous *mode) {
	(void)device;
	if (mode->version != ((1U << 24) | sizeof *mode)) return INVALID;
	mode->mode = HETEROGENEOUS == 1;
	return HETEROGENEOUS < 0 ? NOT_SUPPORTED : OK;
}
static int list(unsigned *count, unsigned *ids, unsigned known) {
	unsigned room = *count, i;
	if (HANGS) pause();
	*count = known;
	if (room < known) return known ? SIZE : OK;
	for (i = 0; i < known; i++) ids[i] = types[i].id;
	return OK;
}
int nvmlDeviceGetSupportedVgpus(void *device, unsigned *count, unsigned *ids) { (void)device; return list(count, ids, TYPES); }
/* One of the first is there, so that only its size could be made. */
int nvmlDeviceGetCreatableVgpus(void *device, unsigned *count, unsigned *ids) { (void)device; return list(count, ids, 1); }
int nvmlDeviceGetActiveVgpus(void *device, unsigned *count, unsigned *ids) {
	unsigned room = *count;
	*count = index_of(device) == 0;
	if (*count && !room) return SIZE;
	if (*count) ids[0] = 77;
	return OK;
}
int nvmlVgpuTypeGetName(unsigned id, char *text, unsigned *length) {
	for (unsigned i = 0; i < TYPES; i++) if (types[i].id == id) snprintf(text, *length, "%s", types[i].name);
	return OK;
}
int nvmlVgpuTypeGetFramebufferSize(unsigned id, unsigned long long *bytes) {
	for (unsigned i = 0; i < TYPES; i++) if (types[i].id == id) *bytes = types[i].megabytes << 20;
	return OK;
}
int nvmlVgpuTypeGetMaxInstances(void *device, unsigned id, unsigned *most) {
	(void)device;
	for (unsigned i = 0; i < TYPES; i++) if (types[i].id == id) *most = types[i].most;
	return OK;
}
int nvmlVgpuInstanceGetVmID(unsigned id, char *text, unsigned length, unsigned *sort) {
	(void)id;
	*sort = 1;
	snprintf(text, length, "0f0e0d0c-0b0a-4908-8706-050403020100");
	return OK;
}
int nvmlVgpuInstanceGetType(unsigned id, unsigned *type) { (void)id; *type = types[0].id; return OK; }
int nvmlVgpuInstanceGetMdevUUID(unsigned id, char *text, unsigned length) {
	(void)id;
	snprintf(text, length, "c728e022-f16f-434b-ad2c-9665ee634d3d");
	return BOARD == A10 ? OK : NOT_SUPPORTED;
}
int nvmlVgpuInstanceGetGpuInstanceId(unsigned id, unsigned *instance) { (void)id; *instance = ~0U; return OK; }
int nvmlDeviceGetDisplayMode(void *device, unsigned *on) { (void)device; *on = 0; return OK; }
int nvmlDeviceGetDisplayActive(void *device, unsigned *on) { (void)device; *on = 0; return OK; }
