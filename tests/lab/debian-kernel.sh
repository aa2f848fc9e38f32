#!/bin/bash
# debian-kernel.sh: the plain machine with the kernel that Debian packages, its modules and an initramfs that finds them: every GPU to VFIO and back,
# and an unbind that hangs. It knows no iommufd, and reading driver_override waits for the device's lock there. For ../nightly.sh.
. "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
state=$(mktemp -d /tmp/gpuvirt-debian-XXXX)
trap 'tests/cluster/down.sh "$state" >/dev/null; rm -rf "$state"' EXIT
ok() { echo "ok: $*"; }
fail() { echo "FAILED: $*" >&2; exit 1; }
guest() { tests/lab/guest.sh "$state" "$@"; }
dependency() { apt-cache depends "$1" | sed -n "s/ *Depends: \($2\)/\1/p" | head -1; }

# Point versions vanish from the archive: whichever it has is taken, and kept while it stays the same.
image=$(dependency linux-image-amd64 'linux-image-.*')
headers=$(dependency linux-headers-amd64 'linux-headers-.*')
release=${image#linux-image-}
kernel=$GPUVIRT_LAB/debian-$release
if [ ! -f "$kernel/complete" ]; then
	rm -rf "$kernel"
	mkdir -p "$kernel/deb"
	(
		cd "$kernel/deb"
		apt-get download -qq -o APT::Sandbox::User=root "$image" "$headers" "$(dependency "$headers" 'linux-headers-.*-common')" "$(dependency "$headers" 'linux-kbuild-.*')"
		for package in *.deb; do dpkg-deb -x "$package" ..; done
	)
	rm -r "$kernel/deb"
	# The headers name each other by where a package manager would have put them.
	sed -i "s#/usr/src/#$kernel/usr/src/#" "$kernel/usr/src/$headers/Makefile"
	touch "$kernel/complete"
fi
drivers=$kernel/drivers
mkdir -p "$drivers"
cp tests/lab/{pciid,nvidia,nvidia_vgpu_vfio}.c "$drivers/"
echo 'obj-m := pciid.o nvidia.o nvidia_vgpu_vfio.o' >"$drivers/Makefile"
make -s -C "$kernel/usr/src/$headers" M="$drivers" modules
mkdir -p "$kernel/lib/modules/$release/updates"
cp "$drivers"/*.ko "$kernel/lib/modules/$release/updates/"
depmod -b "$kernel" "$release"

# What it takes to reach the root image and the shared folders, in the order in which it is needed.
root=$state/initramfs
mkdir -p "$root"/{bin,modules,new,proc}
cp "$(command -v busybox)" "$root/bin/"
modprobe -d "$kernel" -S "$release" -a --show-depends virtio_pci virtio_blk virtio_net ext4 9pnet_virtio 9p |
	awk '$1 == "insmod" && !seen[$2]++ {print $2}' | while read -r module; do
	cp "$module" "$root/modules/"
	basename "$module" >>"$root/modules/order"
done
cat >"$root/init" <<-E
	#!/bin/busybox sh
	b=/bin/busybox
	while read -r module; do \$b insmod /modules/\$module; done </modules/order
	until \$b mount -t ext4 /dev/vda /new 2>/dev/null; do \$b usleep 100000; [ -b /dev/vda ] || \$b mount -t devtmpfs devtmpfs /dev; done
	\$b mkdir -p /new/lib/modules/$release
	\$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,ro modules /new/lib/modules/$release
	\$b mount -t devtmpfs devtmpfs /new/dev
	exec \$b switch_root /new /sbin/init
E
mkdir "$root/dev"
chmod +x "$root/init"
(cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null) | gzip -1 >"$state/initramfs.gz"

KERNEL=$kernel/boot/vmlinuz-$release OUT=$GPUVIRT_LAB tests/lab/plain.sh "$state" "$GPUVIRT_RELEASE/gpuvirt" "$GPUVIRT_RELEASE/examples/switch" -- \
	-initrd "$state/initramfs.gz" -fsdev "local,id=modules,path=$kernel/lib/modules/$release,security_model=none,readonly=on" \
	-device virtio-9p-pci,fsdev=modules,mount_tag=modules,bus=pcie.0
[ "$(guest 'uname -r')" = "$release" ] || fail "another kernel: $(guest 'uname -r')"

drivers() { guest 'for d in /sys/bus/pci/devices/*; do echo ${d##*/} $(basename $(readlink $d/driver || echo none)); done'; }
GPUS="0000:01:00.0 0000:43:00.0 0000:44:00.0 0000:83:00.0"
guest 'modprobe nvidia; [ ! -d /sys/module/vfio_pci ]'
before=$(drivers)
said=$(guest "switch vfio $GPUS") || fail "to vfio: $said"
for address in $GPUS 0000:01:00.1; do grep -qx "$address vfio-pci" <<<"$(drivers)" || fail "$address is not on vfio-pci: $said"; done
said=$(guest "switch host $GPUS") || fail "to the host: $said"
[ "$(drivers)" = "$before" ] || fail "not where they were: $(diff <(echo "$before") <(drivers))"
ok "Linux $release: GPUs to vfio-pci, with their group, and back to where they were: $(tail -1 <<<"$said")"

busy=0000:43:00.0
node=$(guest "sed -n 's/^Device Minor:\s*//p' /proc/driver/nvidia/gpus/$busy/information")
guest "setsid hide /dev/nvidia$node </dev/null >/tmp/hide.log 2>&1 & echo \$! >/tmp/hide.pid; until [ -s /tmp/hide.log ]; do usleep 50000; done"
said=$(guest "timeout 60 switch vfio $busy 0000:44:00.0 >/tmp/said 2>&1; cat /tmp/said")
grep -q "has not come back after 5 s" <<<"$said" || fail "no deadline: $said"
grep -qx "0000:44:00.0 vfio-pci" <<<"$(drivers)" || fail "the other one was not served: $said"
said=$(guest "timeout 60 switch vfio $busy 0000:83:00.0 >/tmp/said 2>&1; cat /tmp/said")
grep -q "WriteHanging: gpu $busy" <<<"$said" || fail "not known to hang: $said"
grep -qx "0000:83:00.0 vfio-pci" <<<"$(drivers)" || fail "the other one was not served: $said"
guest 'kill $(cat /tmp/hide.pid); while [ -d /proc/$(cat /tmp/hide.pid) ]; do usleep 50000; done'
said=$(guest "switch vfio $busy") || fail "not finished after the user let go: $said"
ok "an unbind that hangs is given up in time, others are served, and it is finished when the user has let go"

# Here a read of driver_override waits for the lock that the unbind holds, and a process with a thread that waits so cannot end.
busy=0000:83:00.0
guest "switch host $busy" >/dev/null
node=$(guest "sed -n 's/^Device Minor:\s*//p' /proc/driver/nvidia/gpus/$busy/information")
guest "setsid hide /dev/nvidia$node </dev/null >/tmp/hide.log 2>&1 & echo \$! >/tmp/hide.pid; until [ -s /tmp/hide.log ]; do usleep 50000; done"
guest "setsid switch vfio $busy </dev/null >/dev/null 2>&1 & echo \$! >/tmp/first; until grep -qsx remove /proc/\$(pidof switch | tr ' ' '\n' | sort -n | tail -1)/wchan; do usleep 50000; done; kill -9 \$(cat /tmp/first)"
guest "setsid switch vfio $busy 0000:84:00.0 </dev/null >/tmp/said 2>&1 & echo \$! >/tmp/second; for i in \$(seq 300); do [ -d /proc/\$(cat /tmp/second) ] || exit 0; usleep 100000; done; exit 1" ||
	fail "the next one cannot end: $(guest 'cat /tmp/said')"
said=$(guest 'cat /tmp/said')
grep -q "WriteHanging: gpu $busy" <<<"$said" || fail "not known to hang: $said"
grep -qx "0000:84:00.0 vfio-pci" <<<"$(drivers)" || fail "the other one was not served: $said"
ok "death while an unbind hangs does not make the next one hang"
