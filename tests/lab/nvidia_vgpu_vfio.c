// SPDX-License-Identifier: GPL-2.0
// Test only: the outside of NVIDIA's vGPU host module. What the stand-in driver `nvidia` has bound makes vGPUs: virtual
// functions and, on boards that have none (T4), the GPU itself. Two frameworks, as in the real one: `mdev`, and the vendor's
// own (`current_vgpu_type`). All vGPUs of a board have one framebuffer size unless heterogeneous=1, and no more than its memory.
#include <linux/iommu.h>
#include <linux/mdev.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/vfio.h>

static char *framework = "vendor";
module_param(framework, charp, 0444);
MODULE_PARM_DESC(framework, "vendor or mdev");
static bool heterogeneous;
module_param(heterogeneous, bool, 0644);
static int error;
module_param(error, int, 0644);
MODULE_PARM_DESC(error, "making a vGPU ends with this errno, until it is 0 again");
static int late;
module_param(late, int, 0644);
MODULE_PARM_DESC(late, "no types are shown while it is not 0, as before the vGPU manager has come up");

#define T4_ID 0x1eb8
#define PLACES 64

struct kind { struct mdev_type type; u32 number; const char *name; u32 gigabytes; };
struct board { u32 gigabytes; unsigned int count; struct kind *kinds; };

#define KIND(n, text, size) { { .sysfs_name = #n, .pretty_name = text }, n, text, size }
static const struct kind t4[] = {
	KIND(222, "GRID T4-1B", 1), KIND(230, "GRID T4-1Q", 1), KIND(231, "GRID T4-2Q", 2), KIND(232, "GRID T4-4Q", 4),
	KIND(233, "GRID T4-8Q", 8), KIND(234, "GRID T4-16Q", 16), KIND(319, "GRID T4-4C", 4),
};
static const struct kind a10[] = {
	KIND(588, "NVIDIA A10-1B", 1), KIND(590, "NVIDIA A10-1Q", 1), KIND(592, "NVIDIA A10-4Q", 4),
	KIND(593, "NVIDIA A10-6Q", 6), KIND(594, "NVIDIA A10-8Q", 8), KIND(595, "NVIDIA A10-12Q", 12), KIND(611, "NVIDIA A10-4C", 4),
};
static const struct kind l40s[] = {
	KIND(1147, "NVIDIA L40S-1Q", 1), KIND(1150, "NVIDIA L40S-4Q", 4), KIND(1152, "NVIDIA L40S-8Q", 8),
	KIND(1154, "NVIDIA L40S-16Q", 16), KIND(1155, "NVIDIA L40S-24Q", 24), KIND(1156, "NVIDIA L40S-48Q", 48), KIND(1164, "NVIDIA L40S-16A", 16),
};

struct place;
// A vGPU. It lives until its last user has closed it.
struct vgpu { struct vfio_device vdev; struct place *place; const struct kind *kind; struct list_head list; unsigned int users; };
// A function that makes vGPUs.
struct place {
	struct pci_dev *pci;
	struct board board;
	struct kind kinds[8];
	struct mdev_type *types[8];
	struct mdev_parent parent;
	struct list_head vgpus;
	struct vgpu *own; // of a virtual function with the vendor's framework
};
static struct place *places[PLACES];
static DEFINE_MUTEX(lock);

static bool mdevs(void) { return !strcmp(framework, "mdev"); }
static struct pci_dev *board_of(struct place *place) { return pci_physfn(place->pci); }

// How many more of a type a function takes. Under the lock.
static unsigned int room(struct place *place, const struct kind *kind)
{
	u32 used = 0;
	bool mixed = false;
	struct vgpu *vgpu;
	int i;

	if (late || (place->pci->is_virtfn && !list_empty(&place->vgpus)))
		return 0;
	for (i = 0; i < PLACES; i++) {
		if (!places[i] || board_of(places[i]) != board_of(place))
			continue;
		list_for_each_entry(vgpu, &places[i]->vgpus, list) {
			used += vgpu->kind->gigabytes;
			mixed |= vgpu->kind->gigabytes != kind->gigabytes;
		}
	}
	if ((mixed && !heterogeneous) || used > place->board.gigabytes)
		return 0;
	used = (place->board.gigabytes - used) / kind->gigabytes;
	return place->pci->is_virtfn ? min(used, 1U) : used;
}

static int vgpu_open(struct vfio_device *vdev)
{
	struct vgpu *vgpu = container_of(vdev, struct vgpu, vdev);

	mutex_lock(&lock);
	vgpu->users++;
	mutex_unlock(&lock);
	return 0;
}

static void vgpu_close(struct vfio_device *vdev)
{
	struct vgpu *vgpu = container_of(vdev, struct vgpu, vdev);

	mutex_lock(&lock);
	vgpu->users--;
	mutex_unlock(&lock);
}

static long vgpu_ioctl(struct vfio_device *vdev, unsigned int cmd, unsigned long arg)
{
	struct vfio_device_info info = { .argsz = offsetofend(struct vfio_device_info, num_irqs), .flags = VFIO_DEVICE_FLAGS_PCI };

	if (cmd != VFIO_DEVICE_GET_INFO)
		return -ENOTTY;
	return copy_to_user((void __user *)arg, &info, info.argsz) ? -EFAULT : 0;
}

static const struct vfio_device_ops emulated = {
	.name = "nvidia-vgpu-mdev", .open_device = vgpu_open, .close_device = vgpu_close, .ioctl = vgpu_ioctl,
	.bind_iommufd = vfio_iommufd_emulated_bind, .unbind_iommufd = vfio_iommufd_emulated_unbind,
	.attach_ioas = vfio_iommufd_emulated_attach_ioas, .detach_ioas = vfio_iommufd_emulated_detach_ioas,
};
static const struct vfio_device_ops physical = {
	.name = "nvidia-vgpu-vfio", .open_device = vgpu_open, .close_device = vgpu_close, .ioctl = vgpu_ioctl,
	.bind_iommufd = vfio_iommufd_physical_bind, .unbind_iommufd = vfio_iommufd_physical_unbind,
	.attach_ioas = vfio_iommufd_physical_attach_ioas, .detach_ioas = vfio_iommufd_physical_detach_ioas,
};

static struct vgpu *make(struct place *place, const struct kind *kind, struct device *dev)
{
	struct vgpu *vgpu = ERR_PTR(-ENOSPC);
	int err;

	if (error)
		return ERR_PTR(-error);
	mutex_lock(&lock);
	if (room(place, kind)) {
		vgpu = vfio_alloc_device(vgpu, vdev, dev, mdevs() ? &emulated : &physical);
		if (!IS_ERR(vgpu)) {
			vgpu->place = place;
			vgpu->kind = kind;
			list_add(&vgpu->list, &place->vgpus);
		}
	}
	mutex_unlock(&lock);
	if (IS_ERR(vgpu))
		return vgpu;
	err = mdevs() ? vfio_register_emulated_iommu_dev(&vgpu->vdev) : vfio_register_group_dev(&vgpu->vdev);
	if (!err)
		return vgpu;
	mutex_lock(&lock);
	list_del(&vgpu->list);
	mutex_unlock(&lock);
	vfio_put_device(&vgpu->vdev);
	return ERR_PTR(err);
}

// Waits for who has it open.
static void end(struct vgpu *vgpu)
{
	vfio_unregister_group_dev(&vgpu->vdev);
	mutex_lock(&lock);
	list_del(&vgpu->list);
	mutex_unlock(&lock);
	vfio_put_device(&vgpu->vdev);
}

static int mdev_probe(struct mdev_device *mdev)
{
	struct kind *kind = container_of(mdev->type, struct kind, type);
	struct vgpu *vgpu = make(container_of(mdev->type->parent, struct place, parent), kind, &mdev->dev);

	dev_set_drvdata(&mdev->dev, IS_ERR(vgpu) ? NULL : vgpu);
	return PTR_ERR_OR_ZERO(vgpu);
}

static void mdev_remove(struct mdev_device *mdev)
{
	end(dev_get_drvdata(&mdev->dev));
}

static unsigned int mdev_available(struct mdev_type *type)
{
	unsigned int count;

	mutex_lock(&lock);
	count = room(container_of(type->parent, struct place, parent), container_of(type, struct kind, type));
	mutex_unlock(&lock);
	return count;
}

static ssize_t mdev_description(struct mdev_type *type, char *buf)
{
	struct kind *kind = container_of(type, struct kind, type);
	u32 gigabytes = container_of(type->parent, struct place, parent)->board.gigabytes;

	return sysfs_emit(buf, "num_heads=4, frl_config=60, framebuffer=%uM, max_resolution=7680x4320, max_instance=%u\n",
			  kind->gigabytes << 10, gigabytes / kind->gigabytes);
}

static struct mdev_driver mdev_driver = {
	.device_api = VFIO_DEVICE_API_PCI_STRING,
	.driver = { .name = "nvidia-vgpu-vfio", .owner = THIS_MODULE, .mod_name = KBUILD_MODNAME },
	.probe = mdev_probe, .remove = mdev_remove, .get_available = mdev_available, .show_description = mdev_description,
};

static struct place *place_of(struct device *dev)
{
	int i;

	for (i = 0; i < PLACES; i++)
		if (places[i] && &places[i]->pci->dev == dev)
			return places[i];
	return NULL;
}

static ssize_t creatable_vgpu_types_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct place *place;
	int at = 0;
	unsigned int i;

	mutex_lock(&lock);
	place = place_of(dev);
	if (place && !place->own) {
		at = sysfs_emit(buf, "ID    : vGPU Name\n");
		for (i = 0; i < place->board.count; i++)
			if (room(place, &place->kinds[i]))
				at += sysfs_emit_at(buf, at, "%-6u: %s\n", place->kinds[i].number, place->kinds[i].name);
	}
	mutex_unlock(&lock);
	return at;
}

static ssize_t current_vgpu_type_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct place *place;
	u32 number;

	mutex_lock(&lock);
	place = place_of(dev);
	number = place && place->own ? place->own->kind->number : 0;
	mutex_unlock(&lock);
	return sysfs_emit(buf, "%u\n", number);
}

static ssize_t current_vgpu_type_store(struct device *dev, struct device_attribute *attr, const char *buf, size_t size)
{
	struct vgpu *vgpu = NULL;
	struct kind *kind = NULL;
	struct place *place;
	unsigned int i;
	u32 number;

	if (kstrtou32(buf, 0, &number))
		return -EINVAL;
	mutex_lock(&lock);
	place = place_of(dev);
	if (place)
		vgpu = place->own;
	if (vgpu && (number || vgpu->users))
		vgpu = ERR_PTR(-EBUSY);
	else if (place)
		place->own = NULL;
	for (i = 0; place && i < place->board.count; i++)
		if (place->kinds[i].number == number)
			kind = &place->kinds[i];
	mutex_unlock(&lock);
	if (!place || IS_ERR(vgpu))
		return place ? PTR_ERR(vgpu) : -ENODEV;
	if (!number) {
		if (vgpu)
			end(vgpu);
		return size;
	}
	if (!kind)
		return -EINVAL;
	vgpu = make(place, kind, dev);
	if (IS_ERR(vgpu))
		return PTR_ERR(vgpu) == -ENOSPC && !error ? -EINVAL : PTR_ERR(vgpu);
	place->own = vgpu;
	return size;
}

static DEVICE_ATTR_RO(creatable_vgpu_types);
static DEVICE_ATTR_RW(current_vgpu_type);
static struct attribute *vgpu_attrs[] = { &dev_attr_creatable_vgpu_types.attr, &dev_attr_current_vgpu_type.attr, NULL };
static const struct attribute_group vgpu_group = { .name = "nvidia", .attrs = vgpu_attrs };

static void take(struct place *place, u32 gigabytes, const struct kind *kinds, unsigned int count)
{
	unsigned int i;

	place->board = (struct board) { .gigabytes = gigabytes, .count = count };
	memcpy(place->kinds, kinds, count * sizeof(*kinds));
	for (i = 0; i < count; i++)
		place->types[i] = &place->kinds[i].type;
}

static void bound(struct pci_dev *pci)
{
	struct place *place;
	int i, err;

	// A board with virtual functions makes none itself; one without them only by mdev.
	if (!pci->is_virtfn && !(mdevs() && pci->device == T4_ID))
		return;
	place = kzalloc(sizeof(*place), GFP_KERNEL);
	if (!place)
		return;
	place->pci = pci;
	INIT_LIST_HEAD(&place->vgpus);
	if (!pci->is_virtfn)
		take(place, 16, t4, ARRAY_SIZE(t4));
	else if (mdevs())
		take(place, 24, a10, ARRAY_SIZE(a10));
	else
		take(place, 48, l40s, ARRAY_SIZE(l40s));
	mutex_lock(&lock);
	for (i = 0; i < PLACES && places[i]; i++)
		;
	if (i < PLACES)
		places[i] = place;
	mutex_unlock(&lock);
	if (i == PLACES) {
		kfree(place);
		return;
	}
	if (mdevs())
		err = mdev_register_parent(&place->parent, &pci->dev, &mdev_driver, place->types, place->board.count);
	else
		err = sysfs_create_group(&pci->dev.kobj, &vgpu_group);
	if (err)
		dev_err(&pci->dev, "no vGPUs: %d\n", err);
}

static void unbound(struct pci_dev *pci)
{
	struct place *place;
	int i;

	mutex_lock(&lock);
	place = place_of(&pci->dev);
	mutex_unlock(&lock);
	if (!place)
		return;
	if (mdevs()) {
		mdev_unregister_parent(&place->parent);
	} else {
		sysfs_remove_group(&pci->dev.kobj, &vgpu_group);
		if (place->own)
			end(place->own);
	}
	mutex_lock(&lock);
	for (i = 0; i < PLACES; i++)
		if (places[i] == place)
			places[i] = NULL;
	mutex_unlock(&lock);
	kfree(place);
}

static bool is_ours(struct device *dev)
{
	return dev->driver && !strcmp(dev->driver->name, "nvidia");
}

static int follow(struct notifier_block *nb, unsigned long action, void *data)
{
	struct device *dev = data;

	if (is_ours(dev) && action == BUS_NOTIFY_BOUND_DRIVER)
		bound(to_pci_dev(dev));
	if (is_ours(dev) && action == BUS_NOTIFY_UNBIND_DRIVER)
		unbound(to_pci_dev(dev));
	return NOTIFY_OK;
}

static struct notifier_block notifier = { .notifier_call = follow };

static int __init vgpu_init(void)
{
	struct pci_dev *pci = NULL;
	int err = mdevs() ? mdev_register_driver(&mdev_driver) : 0;

	if (err)
		return err;
	err = bus_register_notifier(&pci_bus_type, &notifier);
	if (err && mdevs())
		mdev_unregister_driver(&mdev_driver);
	if (err)
		return err;
	while ((pci = pci_get_device(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID, pci))) {
		device_lock(&pci->dev);
		if (is_ours(&pci->dev))
			bound(pci);
		device_unlock(&pci->dev);
	}
	return 0;
}

static void __exit vgpu_exit(void)
{
	int i;

	bus_unregister_notifier(&pci_bus_type, &notifier);
	for (i = 0; i < PLACES; i++)
		if (places[i])
			unbound(places[i]->pci);
	if (mdevs())
		mdev_unregister_driver(&mdev_driver);
}

module_init(vgpu_init);
module_exit(vgpu_exit);
MODULE_DESCRIPTION("test-only stand-in for NVIDIA's vGPU host module");
MODULE_LICENSE("GPL");
// The stand-in driver first: it has the devices.
MODULE_SOFTDEP("pre: nvidia");
#ifdef IOMMUFD
MODULE_IMPORT_NS(IOMMUFD);
#endif
