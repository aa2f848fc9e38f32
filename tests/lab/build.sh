#!/bin/bash
# build.sh OUT: the node's kernel, its modules, its root image and what tests use in it, into OUT. BIN is the folder that ../cluster/build.sh filled.
# Skips what is up to date. The kernel's source version is taken once; delete OUT/.kernel to take a newer one.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
BIN=$(cd "${BIN:?the folder that ../cluster/build.sh filled}" && pwd)
mkdir -p "${1:?usage: $0 OUT}"
OUT=$(cd "$1" && pwd)
SOURCE=linux-source-6.12

for need in go gcc make flex bison bc mkfs.ext4 crun nft busybox kmod depmod nsenter /usr/lib/cni/bridge /usr/include/libelf.h; do
	command -v "$need" >/dev/null || [ -f "$need" ] || missing="${missing-} $need"
done
[ -z "${missing-}" ] || { echo "missing:$missing (the packages are in $HERE/packages)" >&2; exit 1; }

step() { # NAME INPUT...: runs the function NAME unless it and the inputs are those of the last time
	local name=$1 stamp=$OUT/.$1 began=$SECONDS inputs
	shift
	inputs=$({ declare -f "$name"; find "$@" -type f | sort | xargs cat; } | sha256sum)
	[ "$(cat "$stamp" 2>/dev/null)" != "$inputs" ] || { echo "$name: up to date"; return; }
	rm -f "$stamp"
	(cd "$OUT" && $name)
	echo "$inputs" >"$stamp"
	echo "$name: built in $((SECONDS - began)) s"
}

kernel() {
	local option
	rm -rf linux deb
	mkdir linux deb
	(cd deb && apt-get download -qq -o APT::Sandbox::User=root $SOURCE && dpkg-deb -x ./*.deb .)
	tar xf deb/usr/src/$SOURCE.tar.xz -C linux --strip-components=1
	rm -r deb
	cd linux
	make -s tinyconfig >/dev/null
	scripts/kconfig/merge_config.sh -m .config "$HERE/frag" >/dev/null
	make -s olddefconfig
	# Every option must be there: the kernel drops silently what lacks a dependency.
	for option in $(grep '^CONFIG' "$HERE/frag"); do grep -qx "$option" .config || { echo "not in the kernel: $option" >&2; return 1; }; done
	nice make -s -j"$(nproc)" bzImage modules
	cp arch/x86/boot/bzImage ../
	rm -rf ../modules
	make -s INSTALL_MOD_PATH=../modules modules_install
	rm -f ../modules/lib/modules/*/{build,source}
}

drivers() {
	mkdir -p drivers
	cp "$HERE"/{pciid,nvidia,nvidia_vgpu_vfio}.c drivers/
	echo 'obj-m := pciid.o nvidia.o nvidia_vgpu_vfio.o' >drivers/Makefile
	make -s -C linux M="$PWD/drivers" modules
	make -s -C linux M="$PWD/drivers" INSTALL_MOD_PATH="$PWD/modules" modules_install
	depmod -b modules "$(ls modules/lib/modules)"
	cp drivers/{nvidia,nvidia_vgpu_vfio}.ko linux/drivers/vfio/mdev/mdev.ko .
}

programs() {
	for program in hold hide cdev killat writes; do gcc -static -O2 -Wall -Wextra -Werror -o $program "$HERE/$program.c"; done
	cd "$HERE/plugin"
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$OUT/vfioplugin" .
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$OUT/kubelet" ./kubelet
}

image() {
	local root=root file lib applet
	rm -rf $root
	mkdir -p $root/{bin,sbin,usr/bin,usr/sbin,usr/lib/cni,lib/modules,lib64,proc,sys,dev,run,tmp,var/log,var/lib/kubelet,root,host}
	cp -r "$HERE/rootfs/." $root/
	cp -r modules/lib/modules/* $root/lib/modules/
	for file in dep alias builtin; do [ -s $root/lib/modules/*/modules.$file ] || { echo "modules.$file is missing" >&2; return 1; }; done
	cp "$(command -v busybox)" $root/bin/busybox
	cp "$BIN"/{kube,containerd,containerd-shim-runc-v2,ctr} "$(command -v crun)" "$(command -v nft)" hold hide cdev killat writes kubelet $root/usr/bin/
	ln -s kube $root/usr/bin/kubectl
	cp /usr/lib/cni/{bridge,host-local,loopback} $root/usr/lib/cni/
	# The kubelet needs the real mount; the rest is for agents that look into the host.
	for file in mount umount findmnt nsenter lsblk; do cp "$(command -v $file)" $root/usr/bin/; done
	cp "$(command -v kmod)" $root/usr/bin/
	for file in modprobe insmod rmmod lsmod modinfo; do ln -s ../usr/bin/kmod $root/sbin/$file; done
	# What programs of Rust need that come later.
	lib=$(dirname "$(ldd $root/usr/bin/kmod | sed -n 's/.*libc\.so\.6 => \([^ ]*\) .*/\1/p')")
	for file in libgcc_s.so.1 libm.so.6; do install -D "$lib/$file" "$root$lib/$file"; done
	for lib in $(for file in $root/usr/bin/* $root/usr/lib/cni/*; do ldd "$file" 2>/dev/null || true; done | grep -o '/lib[^ ]*' | sort -u); do
		mkdir -p "$root/$(dirname "$lib")"
		cp -L "$lib" "$root/$lib"
	done
	for applet in $(busybox --list); do
		[ -e $root/usr/bin/$applet ] || [ -e $root/sbin/$applet ] || ln -s busybox $root/bin/$applet 2>/dev/null || true
	done
	ln -s ../bin/busybox $root/sbin/init
	echo root:x:0:0:root:/root:/bin/sh >$root/etc/passwd
	echo root:x:0: >$root/etc/group
	echo '127.0.0.1 localhost' >$root/etc/hosts
	: >$root/etc/resolv.conf
	echo 0123456789abcdef0123456789abcdef >$root/etc/machine-id
	rm -f root.ext4
	truncate -s 4G root.ext4
	mkfs.ext4 -q -O ^has_journal -E root_owner=0:0 -d $root root.ext4
	rm -r $root
}

# A container image with the programs that hold a device as a VM does.
probe() {
	rm -rf probe
	mkdir -p probe/usr/bin images
	cp hold cdev vfioplugin probe/usr/bin/
	"$HERE/../../images/box.sh" images/probe.tar localhost/probe:test "/bin/sleep 2147483647" probe
	rm -r probe
}

step kernel "$HERE/frag"
step drivers "$HERE"/{pciid,nvidia,nvidia_vgpu_vfio}.c "$OUT/bzImage"
step programs "$HERE/hold.c" "$HERE/hide.c" "$HERE/cdev.c" "$HERE/killat.c" "$HERE/writes.c" "$HERE/plugin"
step image "$HERE/rootfs" "$OUT/.drivers" "$OUT/.programs" "$BIN/kube" "$BIN/containerd"
step probe "$OUT/.programs" "$HERE/../../images/box.sh" "$HERE/../../images/mkimg.py"
