// SPDX-License-Identifier: GPL-2.0
// Test only: the outside of the NVIDIA kernel driver. It takes NVIDIA's display functions and no others, gives each a
// /dev/nvidiaN and /proc/driver/nvidia/gpus/BDF/information; vGPUs are nvidia_vgpu_vfio.c's. As with the real one, unbinding a GPU
// that somebody has open waits until it is closed, and an open device keeps the module loaded.
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/version.h>

#define GPU_MAJOR 195
#define CONTROL_MINOR 255
#define GPUS 32

static char broken[16];
module_param_string(broken, broken, sizeof(broken), 0644);
MODULE_PARM_DESC(broken, "DDDD:BB:DD.F of a function whose probe fails");

static int vfs_error;
module_param(vfs_error, int, 0644);
MODULE_PARM_DESC(vfs_error, "making virtual functions ends with this errno, until it is 0 again");

struct gpu {
	struct pci_dev *pci;
	int minor; // -1 for a VF, which has no device node
	unsigned int users;
	wait_queue_head_t closed;
	struct proc_dir_entry *proc;
};

static struct gpu *gpus[GPUS];
static DEFINE_SPINLOCK(lock);
static struct proc_dir_entry *proc_gpus;

static int gpu_open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);
	struct gpu *gpu;

	if (minor == CONTROL_MINOR)
		return 0;
	spin_lock(&lock);
	gpu = minor < GPUS ? gpus[minor] : NULL;
	if (gpu)
		gpu->users++;
	spin_unlock(&lock);
	file->private_data = gpu;
	return gpu ? 0 : -ENODEV;
}

static int gpu_release(struct inode *inode, struct file *file)
{
	struct gpu *gpu = file->private_data;

	spin_lock(&lock);
	if (gpu && !--gpu->users)
		wake_up(&gpu->closed);
	spin_unlock(&lock);
	return 0;
}

static const struct file_operations fops = { .owner = THIS_MODULE, .open = gpu_open, .release = gpu_release };

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
static char *everyone(struct device *dev, umode_t *mode)
#else
static char *everyone(const struct device *dev, umode_t *mode)
#endif
{
	if (mode)
		*mode = 0666;
	return NULL;
}

// The real driver has no class: its nodes are made from user space. Without a parent this one leaves no trace below the GPU.
static struct class class = { .name = "nvidia-test", .devnode = everyone };

static int information(struct seq_file *file, void *unused)
{
	struct gpu *gpu = file->private;

	seq_printf(file, "Model: \t\t Test GPU %04x:%04x\n", gpu->pci->vendor, gpu->pci->device);
	seq_printf(file, "Bus Type: \t PCIe\nBus Location: \t %s\n", pci_name(gpu->pci));
	seq_printf(file, "Device Minor: \t %d\nGPU Excluded:\t No\n", gpu->minor);
	return 0;
}

static int probe(struct pci_dev *pci, const struct pci_device_id *id)
{
	struct gpu *gpu = devm_kzalloc(&pci->dev, sizeof(*gpu), GFP_KERNEL);
	int minor = 0;

	if (!gpu)
		return -ENOMEM;
	if (!strcmp(strim(broken), pci_name(pci)))
		return -EIO;
	*gpu = (struct gpu) { .pci = pci, .minor = -1 };
	init_waitqueue_head(&gpu->closed);
	pci_set_drvdata(pci, gpu);
	if (pci->is_virtfn)
		return 0;
	spin_lock(&lock);
	while (minor < GPUS && gpus[minor])
		minor++;
	if (minor < GPUS) {
		gpu->minor = minor;
		gpus[minor] = gpu;
	}
	spin_unlock(&lock);
	if (gpu->minor < 0)
		return -ENOSPC;
	gpu->proc = proc_mkdir(pci_name(pci), proc_gpus);
	proc_create_single_data("information", 0444, gpu->proc, information, gpu);
	device_create(&class, NULL, MKDEV(GPU_MAJOR, minor), NULL, "nvidia%d", minor);
	return 0;
}

static bool retired(struct gpu *gpu)
{
	bool unused;

	spin_lock(&lock);
	unused = !gpu->users;
	if (unused)
		gpus[gpu->minor] = NULL;
	spin_unlock(&lock);
	return unused;
}

static void remove(struct pci_dev *pci)
{
	struct gpu *gpu = pci_get_drvdata(pci);

	if (pci->is_virtfn)
		return;
	wait_event(gpu->closed, retired(gpu));
	device_destroy(&class, MKDEV(GPU_MAJOR, gpu->minor));
	proc_remove(gpu->proc);
	pci_disable_sriov(pci);
}

static int set_vfs(struct pci_dev *pci, int count)
{
	return count && vfs_error ? -vfs_error : pci_sriov_configure_simple(pci, count);
}

static const struct pci_device_id ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID), .class = PCI_BASE_CLASS_DISPLAY << 16, .class_mask = 0xff0000 },
	{ }
};
MODULE_DEVICE_TABLE(pci, ids);
static struct pci_driver driver = {
	.name = "nvidia", .id_table = ids, .probe = probe, .remove = remove, .sriov_configure = set_vfs,
	// A virtual function that is a vGPU goes to a VM on this driver.
	.driver_managed_dma = true
};

static int __init nvidia_init(void)
{
	int err = register_chrdev(GPU_MAJOR, "nvidia", &fops);

	if (err)
		return err;
	err = class_register(&class);
	if (err)
		goto no_class;
	device_create(&class, NULL, MKDEV(GPU_MAJOR, CONTROL_MINOR), NULL, "nvidiactl");
	proc_gpus = proc_mkdir("gpus", proc_mkdir("driver/nvidia", NULL));
	err = pci_register_driver(&driver);
	if (!err)
		return 0;
	remove_proc_subtree("driver/nvidia", NULL);
	device_destroy(&class, MKDEV(GPU_MAJOR, CONTROL_MINOR));
	class_unregister(&class);
no_class:
	unregister_chrdev(GPU_MAJOR, "nvidia");
	return err;
}

static void __exit nvidia_exit(void)
{
	pci_unregister_driver(&driver);
	remove_proc_subtree("driver/nvidia", NULL);
	device_destroy(&class, MKDEV(GPU_MAJOR, CONTROL_MINOR));
	class_unregister(&class);
	unregister_chrdev(GPU_MAJOR, "nvidia");
}

module_init(nvidia_init);
module_exit(nvidia_exit);
MODULE_DESCRIPTION("test-only stand-in for the NVIDIA driver");
MODULE_VERSION("570.86.15");
MODULE_LICENSE("GPL");
