#!/bin/bash
# real-holder.sh: a real QEMU in the plain machine's guest gives a GPU to a guest of its own, which finds it on its PCI bus; meanwhile the library
# refuses to take it away, and names that QEMU. Emulation in emulation: two minutes. For ../nightly.sh.
. "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
state=$(mktemp -d /tmp/gpuvirt-holder-XXXX)
GPU=0000:43:00.0
trap 'tests/cluster/down.sh "$state" >/dev/null; rm -rf "$state"' EXIT
ok() { echo "ok: $*"; }
fail() { echo "FAILED: $*" >&2; exit 1; }
guest() { tests/lab/guest.sh "$state" "$@"; }
serial() { cat "$state/vm/inner/serial.log" 2>/dev/null || true; }
wait_for() { # SECONDS TEXT, on the inner guest's console
	local end=$((SECONDS + $1))
	until serial | grep -q "$2"; do
		[ $SECONDS -lt $end ] || { serial >&2; guest 'cat /tmp/qemu.log' >&2; fail "the inner guest has not said within $1 s: $2"; }
		sleep 1
	done
}

MEMORY=2048 OUT=$GPUVIRT_LAB tests/lab/plain.sh "$state" "$GPUVIRT_RELEASE/gpuvirt" "$GPUVIRT_RELEASE/examples/switch"

# QEMU with what it is linked against and what it loads; the outer guest's C library is this host's.
inner=$state/vm/inner
qemu=$(command -v qemu-system-x86_64)
mkdir -p "$inner"/{lib,modules,root/{bin,proc,sys,dev}}
cp "$qemu" "$GPUVIRT_LAB/bzImage" "$inner/"
ldd "$qemu" | grep -o '/[^ ]*' | xargs -I{} cp -L {} "$inner/lib/"
cp "$(dirname "$(ldd "$qemu" | sed -n 's/.*libc\.so\.6 => \([^ ]*\) .*/\1/p')")/qemu/accel-tcg-x86_64.so" "$inner/modules/"
cp -rL /usr/share/seabios/bios-256k.bin /usr/share/qemu/{kvmvapic,linuxboot_dma}.bin "$inner/"
cp "$(command -v busybox)" "$inner/root/bin/"
cat >"$inner/root/init" <<-'E'
	#!/bin/busybox sh
	/bin/busybox mount -t sysfs sysfs /sys
	for device in /sys/bus/pci/devices/*; do
		read -r vendor <$device/vendor; read -r id <$device/device
		echo "found ${vendor#0x}:${id#0x}"
	done
	echo "that is all"
	exec /bin/busybox sleep 1000000
E
chmod +x "$inner/root/init"
truncate -s 16M "$inner/disk"
mkfs.ext4 -q -O ^has_journal -d "$inner/root" "$inner/disk"

guest "modprobe nvidia && switch vfio $GPU" >/dev/null
group=$(guest "basename \$(readlink /sys/bus/pci/devices/$GPU/iommu_group)")
guest "cd /host/inner && QEMU_MODULE_DIR=/host/inner/modules LD_LIBRARY_PATH=/host/inner/lib setsid ./qemu-system-x86_64 -L /host/inner -nodefaults -display none \
	-accel tcg -machine q35 -cpu max -m 128 -smp 1 -kernel bzImage -append 'root=/dev/vda console=ttyS0 init=/init panic=-1 quiet' \
	-drive if=none,id=root,file=disk,format=raw,readonly=on -device virtio-blk-pci,drive=root -serial file:serial.log -no-reboot \
	-device vfio-pci,host=$GPU </dev/null >/tmp/qemu.log 2>&1 & echo \$! >/tmp/qemu.pid"
wait_for 300 "that is all"
serial | grep -q "found 10de:1eb8" || { serial >&2; fail "the inner guest has no GPU"; }
ok "a virtual machine in the virtual machine finds its GPU: $(serial | grep -o 'found 10de.*')"

pid=$(guest 'cat /tmp/qemu.pid')
refused=$(guest "switch host $GPU" || true)
grep -qF "gpu $GPU is in use by pid $pid (qemu-system-x86) with /dev/vfio/$group; end process $pid" <<<"$refused" || fail "not refused with its holder: $refused"
ok "$refused"
planned=$(guest "gpuvirt plan --mode container --device $GPU" || true)
grep -q "pid $pid (qemu-system-x86)" <<<"$planned" || fail "the plan does not name the holder: $planned"
[ "$(guest "basename \$(readlink /sys/bus/pci/devices/$GPU/driver)")" = vfio-pci ] || fail "the GPU was taken from a running VM"
guest "kill -0 $pid" || fail "the VM has ended"
guest "kill $pid; while [ -d /proc/$pid ]; do usleep 100000; done; switch host $GPU" >/dev/null
[ "$(guest "basename \$(readlink /sys/bus/pci/devices/$GPU/driver)")" = nvidia ] || fail "not given back after the VM's end"
ok "given back once the VM has ended"
