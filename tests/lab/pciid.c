// SPDX-License-Identifier: GPL-2.0
// Test only: overrides dwords of PCI config space, so that an emulated device carries a GPU's identity everywhere:
// sysfs, modalias, driver matching, lspci, VFIO, and again after a rescan. "gone" makes one function read all ones.
#include <linux/module.h>
#include <linux/pci.h>

#define RULES 64

static char *set[RULES];
static int count;
module_param_array(set, charp, &count, 0444);
MODULE_PARM_DESC(set, "BB:DD.F@OFFSET=DWORD, all hexadecimal");
static char gone[16];
module_param_string(gone, gone, sizeof(gone), 0644);
MODULE_PARM_DESC(gone, "BB:DD.F of a function that does not answer any more");

static struct { unsigned int bus, devfn, offset, value; } rules[RULES];
static struct pci_ops *real, fake;

static int parse(const char *text, unsigned int *bus, unsigned int *devfn)
{
	unsigned int slot, function;

	if (sscanf(text, "%x:%x.%x", bus, &slot, &function) != 3)
		return -EINVAL;
	*devfn = PCI_DEVFN(slot, function);
	return 0;
}

static int fake_read(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	unsigned int gone_bus, gone_devfn;
	int err, i;

	if (gone[0] && !parse(gone, &gone_bus, &gone_devfn) && gone_bus == bus->number && gone_devfn == devfn) {
		PCI_SET_ERROR_RESPONSE(value);
		return PCIBIOS_SUCCESSFUL;
	}
	err = real->read(bus, devfn, where, size, value);
	for (i = 0; !err && i < count; i++)
		if (rules[i].bus == bus->number && rules[i].devfn == devfn && rules[i].offset == (where & ~3))
			*value = (rules[i].value >> (8 * (where & 3))) & (0xffffffff >> (8 * (4 - size)));
	return err;
}

static void replace(struct pci_bus *bus, struct pci_ops *from, struct pci_ops *to)
{
	struct pci_bus *child;

	if (bus->ops == from)
		pci_bus_set_ops(bus, to);
	list_for_each_entry(child, &bus->children, node)
		replace(child, from, to);
}

static void replace_all(struct pci_ops *from, struct pci_ops *to)
{
	struct pci_bus *root = NULL;

	while ((root = pci_find_next_bus(root)))
		replace(root, from, to);
}

static void refresh(struct pci_dev *dev)
{
	u32 class;

	pci_read_config_word(dev, PCI_VENDOR_ID, &dev->vendor);
	pci_read_config_word(dev, PCI_DEVICE_ID, &dev->device);
	pci_read_config_word(dev, PCI_SUBSYSTEM_VENDOR_ID, &dev->subsystem_vendor);
	pci_read_config_word(dev, PCI_SUBSYSTEM_ID, &dev->subsystem_device);
	pci_read_config_dword(dev, PCI_CLASS_REVISION, &class);
	dev->class = class >> 8;
	dev->revision = class & 0xff;
}

static int __init pciid_init(void)
{
	struct pci_dev *dev;
	int i;

	for (i = 0; i < count; i++)
		if (parse(set[i], &rules[i].bus, &rules[i].devfn) ||
		    sscanf(strchrnul(set[i], '@'), "@%x=%x", &rules[i].offset, &rules[i].value) != 2)
			return -EINVAL;
	real = pci_find_next_bus(NULL)->ops;
	fake = *real;
	fake.read = fake_read;
	replace_all(real, &fake);
	for (i = 0; i < count; i++) {
		dev = pci_get_domain_bus_and_slot(0, rules[i].bus, rules[i].devfn);
		if (dev)
			refresh(dev);
		pci_dev_put(dev);
	}
	return 0;
}

static void __exit pciid_exit(void)
{
	replace_all(&fake, real);
}

module_init(pciid_init);
module_exit(pciid_exit);
MODULE_LICENSE("GPL");
