// hold GROUP BDF [SECONDS]: opens an IOMMU group and a device in it, as QEMU does, and holds them: "a VM is running".
#include <fcntl.h>
#include <linux/vfio.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

static int fail(const char *what)
{
	perror(what);
	return 1;
}

int main(int argc, char **argv)
{
	struct vfio_group_status status = {.argsz = sizeof status};
	int container, group, device;
	char path[64];

	if (argc < 3) {
		fprintf(stderr, "usage: hold GROUP BDF [SECONDS]\n");
		return 2;
	}
	snprintf(path, sizeof path, "/dev/vfio/%s", argv[1]);
	if ((container = open("/dev/vfio/vfio", O_RDWR)) < 0)
		return fail("/dev/vfio/vfio");
	if ((group = open(path, O_RDWR)) < 0)
		return fail(path);
	if (ioctl(group, VFIO_GROUP_GET_STATUS, &status))
		return fail("group status");
	printf("viable=%d\n", !!(status.flags & VFIO_GROUP_FLAGS_VIABLE));
	if (ioctl(group, VFIO_GROUP_SET_CONTAINER, &container))
		return fail("container");
	if (ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1_IOMMU))
		return fail("iommu");
	if ((device = ioctl(group, VFIO_GROUP_GET_DEVICE_FD, argv[2])) < 0)
		return fail(argv[2]);
	printf("devfd=%d\n", device);
	fflush(stdout);
	if (argc > 3)
		sleep(atoi(argv[3]));
	return 0;
}
