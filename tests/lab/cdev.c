// cdev /dev/vfio/devices/vfioN [SECONDS]: opens a device through iommufd, as QEMU does with iommufd=on, prints the identity that VFIO shows,
// and holds the device.
#include <fcntl.h>
#include <linux/vfio.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

// Linux 6.6; Debian 12's headers are older.
struct bind { __u32 argsz, flags; __s32 iommufd; __u32 out_devid; };
struct attach { __u32 argsz, flags, pt_id; };
struct ioas { __u32 size, flags, out_ioas_id; };
#define BIND_IOMMUFD _IO(VFIO_TYPE, VFIO_BASE + 18)
#define ATTACH_IOMMUFD_PT _IO(VFIO_TYPE, VFIO_BASE + 19)
#define IOAS_ALLOC _IO(';', 0x81)

static int fail(const char *what)
{
	perror(what);
	return 1;
}

int main(int argc, char **argv)
{
	struct bind bind = {.argsz = sizeof bind};
	struct ioas ioas = {.size = sizeof ioas};
	struct attach attach = {.argsz = sizeof attach};
	struct vfio_region_info region = {.argsz = sizeof region, .index = VFIO_PCI_CONFIG_REGION_INDEX};
	unsigned short id[2];
	int device, iommu;

	if (argc < 2 || (device = open(argv[1], O_RDWR)) < 0)
		return fail("device");
	if ((iommu = open("/dev/iommu", O_RDWR)) < 0)
		return fail("/dev/iommu");
	bind.iommufd = iommu;
	if (ioctl(device, BIND_IOMMUFD, &bind))
		return fail("bind");
	if (ioctl(iommu, IOAS_ALLOC, &ioas))
		return fail("ioas");
	attach.pt_id = ioas.out_ioas_id;
	if (ioctl(device, ATTACH_IOMMUFD_PT, &attach))
		return fail("attach");
	if (ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &region))
		return fail("region");
	if (pread(device, id, sizeof id, region.offset) != sizeof id)
		return fail("read");
	printf("%04x:%04x\n", id[0], id[1]);
	fflush(stdout);
	if (argc > 2)
		sleep(atoi(argv[2]));
	return 0;
}
