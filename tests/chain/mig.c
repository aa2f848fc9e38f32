/* MIG of the stand-in library: seven slices, instances of one and two. Part of vgpus.c. */
#define INSTANCES 8
struct mig { unsigned on, next, count; struct { unsigned id, profile, compute; } of[INSTANCES]; };
static const struct { unsigned id, slices; const char *name; } profiles[] = { { 19, 1, "MIG 1g.10gb" }, { 14, 2, "MIG 2g.20gb" } };
#define PROFILES (sizeof profiles / sizeof *profiles)

static struct mig read_mig(void) {
	struct mig mig = { 0 };
	FILE *file = fopen("/mig-state", "r");
	if (!file) return mig;
	if (fread(&mig, sizeof mig, 1, file) != 1) memset(&mig, 0, sizeof mig);
	fclose(file);
	return mig;
}
static void write_mig(const struct mig *mig) {
	FILE *file = fopen("/mig-state", "w");
	if (file) { fwrite(mig, sizeof *mig, 1, file); fclose(file); }
}
static void mode(unsigned *now, unsigned *then) {
#ifdef MIGS
	struct mig mig = read_mig();
	*now = mig.on;
	*then = mig.next;
#else
	(void)now; (void)then;
#endif
}
static unsigned slices(unsigned profile) {
	for (unsigned i = 0; i < PROFILES; i++) if (profiles[i].id == profile) return profiles[i].slices;
	return 0;
}
static unsigned used(const struct mig *mig) {
	unsigned sum = 0;
	for (unsigned i = 0; i < mig->count; i++) sum += slices(mig->of[i].profile);
	return sum;
}
static int place_of(const struct mig *mig, void *instance) {
	for (unsigned i = 0; i < mig->count; i++) if (mig->of[i].id == (unsigned)(long)instance) return (int)i;
	return -1;
}

struct info { unsigned version, id, p2p, slices, most, processors, copy, decoder, encoder, jpeg, ofa; unsigned long long megabytes; char name[96]; };
struct instance { void *device; unsigned id, profile, start, size; };
struct compute { unsigned id, slices, most, processors, copy, decoder, encoder, jpeg, ofa; };

int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **device) {
	*device = (void *)1L;
	return strstr(text, "3b:00.0") || strstr(text, "3B:00.0") ? OK : NOT_FOUND;
}
int nvmlDeviceSetMigMode(void *device, unsigned on, int *status) {
	struct mig mig = read_mig();
	(void)device;
	mig.next = on;
	if (!LATER) mig.on = on;
	*status = LATER ? 16 : OK;
	write_mig(&mig);
	return OK;
}
int nvmlDeviceGetGpuInstanceProfileInfoV(void *device, unsigned index, struct info *info) {
	(void)device;
	if (info->version != ((2U << 24) | sizeof *info)) return INVALID;
	if (index >= PROFILES) return index > 12 ? INVALID : NOT_SUPPORTED;
	info->id = profiles[index].id;
	info->slices = profiles[index].slices;
	info->most = 7 / profiles[index].slices;
	snprintf(info->name, sizeof info->name, "%s", profiles[index].name);
	return OK;
}
int nvmlDeviceGetGpuInstanceRemainingCapacity(void *device, unsigned profile, unsigned *count) {
	struct mig mig = read_mig();
	(void)device;
	*count = (7 - used(&mig)) / slices(profile);
	return OK;
}
int nvmlDeviceGetGpuInstances(void *device, unsigned profile, void **found, unsigned *count) {
	struct mig mig = read_mig();
	(void)device;
	*count = 0;
	for (unsigned i = 0; i < mig.count; i++)
		if (mig.of[i].profile == profile) found[(*count)++] = (void *)(long)mig.of[i].id;
	return OK;
}
int nvmlGpuInstanceGetInfo(void *instance, struct instance *info) {
	struct mig mig = read_mig();
	int place = place_of(&mig, instance);
	if (place < 0) return NOT_FOUND;
	info->id = mig.of[place].id;
	info->profile = mig.of[place].profile;
	return OK;
}
int nvmlGpuInstanceGetComputeInstanceProfileInfo(void *instance, unsigned index, unsigned engines, struct compute *info) {
	struct mig mig = read_mig();
	int place = place_of(&mig, instance);
	if (place < 0 || engines) return INVALID;
	if (index >= slices(mig.of[place].profile)) return NOT_SUPPORTED;
	info->id = index;
	info->slices = index + 1;
	info->most = slices(mig.of[place].profile) / (index + 1);
	return OK;
}
int nvmlGpuInstanceGetComputeInstances(void *instance, unsigned profile, void **found, unsigned *count) {
	struct mig mig = read_mig();
	int place = place_of(&mig, instance);
	/* The compute instance has all of the GPU instance. */
	*count = place >= 0 && mig.of[place].compute == profile + 1;
	if (*count) found[0] = instance;
	return OK;
}
int nvmlDeviceCreateGpuInstance(void *device, unsigned profile, void **made) {
	struct mig mig = read_mig();
	(void)device;
	if (!mig.on) return NOT_SUPPORTED;
	if (used(&mig) + slices(profile) > 7) return NO_ROOM;
	mig.of[mig.count].id = mig.count ? mig.of[mig.count - 1].id + 1 : 1;
	mig.of[mig.count].profile = profile;
	mig.of[mig.count].compute = 0;
	*made = (void *)(long)mig.of[mig.count++].id;
	write_mig(&mig);
	return OK;
}
int nvmlGpuInstanceCreateComputeInstance(void *instance, unsigned profile, void **made) {
	struct mig mig = read_mig();
	int place = place_of(&mig, instance);
	if (place < 0) return NOT_FOUND;
	mig.of[place].compute = profile + 1;
	*made = instance;
	write_mig(&mig);
	return OK;
}
int nvmlComputeInstanceDestroy(void *compute) {
	struct mig mig = read_mig();
	int place = place_of(&mig, compute);
	if (place < 0) return NOT_FOUND;
	mig.of[place].compute = 0;
	write_mig(&mig);
	return OK;
}
int nvmlGpuInstanceDestroy(void *instance) {
	struct mig mig = read_mig();
	int place = place_of(&mig, instance);
	if (place < 0) return NOT_FOUND;
	if (mig.of[place].compute) return IN_USE;
	memmove(&mig.of[place], &mig.of[place + 1], (INSTANCES - 1 - place) * sizeof *mig.of);
	mig.count--;
	write_mig(&mig);
	return OK;
}
int nvmlVgpuTypeGetGpuInstanceProfileId(unsigned kind, unsigned *profile) {
	*profile = kind == 828 || kind == 474 ? 19 : kind == 829 || kind == 475 ? 14 : ~0U;
	return OK;
}
struct most { unsigned version, kind, most; };
int nvmlVgpuTypeGetMaxInstancesPerGpuInstance(struct most *most) {
	if (most->version != ((1U << 24) | sizeof *most)) return INVALID;
	most->most = most->kind == 828 ? 2 : 1;
	return OK;
}
