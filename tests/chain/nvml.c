/* Stand-in for libnvidia-ml.so.1: one GPU, or what the macro says is wrong. Types as in nvml.h. */
#include <stdio.h>
#include <string.h>

#ifndef GPUS
#define GPUS 1
#endif
#ifndef INIT
#define INIT 0 /* 18: NVML_ERROR_LIB_RM_VERSION_MISMATCH */
#endif

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

int nvmlInit_v2(void) { return INIT; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "595.91.07"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(unsigned long)(index + 1); return 0; }
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci) {
	(void)device;
	memset(pci, 0, sizeof *pci);
	pci->bus = 0x3b;
	pci->id = 0x1eb810de;
	strcpy(pci->legacy, "0000:3B:00.0");
	strcpy(pci->bus_id, "00000000:3B:00.0");
	return 0;
}
int nvmlDeviceGetName(void *device, char *text, unsigned length) { (void)device; snprintf(text, length, "Tesla T4"); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned length) { (void)device; snprintf(text, length, "GPU-1"); return 0; }
