# Sourced by up.sh and plain.sh, after common.sh: the machine that both boot, and what its devices say they are.
OUT=$(cd "${OUT:?the folder that build.sh filled}" && pwd)

# PCI_SET overrides it, as BB:DD.F@OFFSET=DWORD of config space.
identity() { # BB:DD.F DEVICE CLASS SUBSYSTEM, of vendor 10de
	printf '%s@0=%s10de,%s@8=%sa1,%s@2c=%s10de,' "$1" "$2" "$1" "$3" "$1" "$4"
}
cards=$(
	identity 01:00.0 1eb1 030000 12a0 # Quadro RTX 4000 …
	identity 01:00.1 10f8 040300 12a0 # … and its audio function, in one group
	identity 43:00.0 1eb8 030200 12a2 # Tesla T4
	identity 44:00.0 1eb8 030200 12a2
	identity 83:00.0 2330 030200 16c1 # H100 SXM5 80GB
	identity 84:00.0 2330 030200 16c1
)

share() { # HOST_IP GUEST_IP KUBE: makes STATE/vm, which is /host in the guest
	ln -sfn "$OUT" "$STATE/vm-out"
	rm -rf "$VM"
	mkdir -p "$VM"/{bin,images,log}
	cat >"$VM/env" <<-E
		NODE=$NODE
		HOST_IP=$1
		GUEST_IP=$2
		KUBE=$3
		PCI_SET=${PCI_SET-${cards%,}}
	E
}

boot() { # NETWORK [ARGUMENT...]: QEMU with this network and further arguments; comes back when the guest's rc is through
	local network=$1 memory=${MEMORY:-8192}
	shift
	began=$(date +%s%N)
	TMPDIR=$STATE start vm qemu-system-x86_64 -nodefaults -nographic -accel tcg,thread=multi -machine q35 -cpu "${CPU:-max}" -m "$memory" -smp 2 \
		-numa node,nodeid=0,cpus=0,memdev=m0 -numa node,nodeid=1,cpus=1,memdev=m1 \
		-object "memory-backend-ram,id=m0,size=$((memory / 2))M" -object "memory-backend-ram,id=m1,size=$((memory / 2))M" \
		-device intel-iommu,caching-mode=on,aw-bits=48 \
		-device pxb-pcie,id=pxb0,bus=pcie.0,bus_nr=0x40,numa_node=0 -device pxb-pcie,id=pxb1,bus=pcie.0,bus_nr=0x80,numa_node=1 \
		-device pcie-root-port,id=rp0,bus=pxb0,chassis=1,slot=1 -device x3130-upstream,id=up0,bus=rp0 \
		-device xio3130-downstream,id=d0,bus=up0,chassis=11,slot=1 -device xio3130-downstream,id=d1,bus=up0,chassis=12,slot=2 \
		-device pcie-root-port,id=rp1,bus=pxb1,chassis=2,slot=2 -device x3130-upstream,id=up1,bus=rp1 \
		-device xio3130-downstream,id=d2,bus=up1,chassis=13,slot=1 -device xio3130-downstream,id=d3,bus=up1,chassis=14,slot=2 \
		-device edu,id=gpu0,bus=d0 -device edu,id=gpu1,bus=d1 -device edu,id=gpu2,bus=d2 -device edu,id=gpu3,bus=d3 \
		-device pcie-root-port,id=rp2,bus=pcie.0,chassis=3,slot=3 -device edu,id=twin,bus=rp2,addr=0.0,multifunction=on -device ich9-intel-hda,bus=rp2,addr=0.1 \
		-device pcie-root-port,id=rp3,bus=pcie.0,chassis=4,slot=4 -device nvme-subsys,id=ss0 \
		-device nvme,id=nvme0,bus=rp3,serial=abc,subsys=ss0,sriov_max_vfs=4,sriov_vq_flexible=8,sriov_vi_flexible=8,max_ioqpairs=16,msix_qsize=17 \
		-drive "if=none,id=root,file=$OUT/root.ext4,format=raw,snapshot=on,cache=unsafe" -device virtio-blk-pci,drive=root,bus=pcie.0 \
		-netdev "$network,id=net" -device virtio-net-pci,netdev=net,bus=pcie.0,romfile= \
		-fsdev "local,id=host,path=$VM,security_model=none" -device virtio-9p-pci,fsdev=host,mount_tag=host,bus=pcie.0 \
		-qmp "unix:$VM/monitor.sock,server=on,wait=off" -serial "file:$VM/log/console.log" \
		-kernel "${KERNEL:-$OUT/bzImage}" -append "root=/dev/vda rw console=ttyS0 quiet panic=-1 ${APPEND-intel_iommu=on iommu=pt}" "$@"
	until_ok 60 eval '[ -s "$VM/log/times" ] || ! alive'
	alive || { cat "$STATE/log/vm.log" "$VM/log/console.log" >&2; exit 1; }
	echo "booted after $(seconds) s"
}
alive() { [ -n "$(started "$(cut -d' ' -f1 "$STATE/pids/vm")")" ]; }
seconds() { echo "$((($(date +%s%N) - began) / 100000000))" | sed 's/.$/.&/; s/^\./0./'; }
