#!/bin/bash
# up.sh STATE [IMAGE.tar...]: boots a virtual machine as node "node-1" of the control plane in STATE, and waits until it is Ready.
# The control plane may be starting still: what the machine is given of it is waited for.
# OUT is the folder that build.sh filled. The images of BIN named in IMAGES (default: pause box) and the further archives are there from the start.
. "$(dirname "$0")/common.sh"
. "$LAB/machine.sh"
shift
HOST_IP=10.87.0.1
GUEST_IP=10.87.0.2
TAP=${TAP:-vmnode0}
[ ! -e "$STATE/vm-out" ] || { echo "$STATE has a virtual machine already; run down.sh first" >&2; exit 1; }

# The first of its programs is started when all of that is written, and when nodes of earlier runs have gone.
until_ok 180 test -s "$STATE/pids/etcd"
! ip link show "$TAP" >/dev/null 2>&1 || { echo "$TAP exists: only one node can run on a machine" >&2; exit 1; }
. "$STATE/env"
share $HOST_IP $GUEST_IP "$(readlink -f "$STATE/bin/kube")"
echo $GUEST_IP/2222 >"$VM/shell"
archives=()
for image in ${IMAGES-pause box}; do archives+=("$STATE/bin/images/$image.tar"); done
cp "$STATE/pki/ca.crt" "$VM/"
for name in kubelet proxy; do sed "s#$STATE/pki#/host#" "$STATE/$name.kubeconfig" >"$VM/$name.kubeconfig"; done

# Unpacked by a containerd of this host: the one in the guest would take a minute and a half, under TCG.
store() { # DISK ARCHIVE...: a disk with /var/lib/containerd
	local disk=$1 work=$STATE/store archive
	shift
	mkdir "$work"
	cat >"$work/config.toml" <<-E
		version = 3
		root = '$work/root'
		state = '$work/state'
		disabled_plugins = ['io.containerd.cri.v1.images', 'io.containerd.cri.v1.runtime', 'io.containerd.grpc.v1.cri', 'io.containerd.nri.v1.nri']
		[grpc]
		  address = '$work/socket'
		[ttrpc]
		  address = '$work/ttrpc'
		[plugins.'io.containerd.internal.v1.opt']
		  path = '$work/opt'
	E
	ctr=("$STATE/bin/ctr" -a "$work/socket" -n k8s.io)
	start store "$STATE/bin/containerd" -c "$work/config.toml"
	until_ok 30 "${ctr[@]}" version
	for archive in "$@"; do "${ctr[@]}" images import --snapshotter overlayfs "$archive" >>"$STATE/log/images.log" 2>&1; done
	stop store
	truncate -s 8G "$disk"
	mkfs.ext4 -q -O ^has_journal -E root_owner=0:0 -d "$work/root" "$disk"
	rm -r "$work"
}
store "$STATE/images.ext4" "${archives[@]}" "$@"

# The guest reaches the API server at the host's own address; the routes let the host reach pods, and Services through the guest's kube-proxy.
echo "$TAP" >"$STATE/tap"
ip tuntap add dev "$TAP" mode tap
ip addr add $HOST_IP/24 dev "$TAP"
ip link set "$TAP" up
ip route add $POD_CIDR via $GUEST_IP
ip route add $SERVICE_CIDR via $GUEST_IP

boot "tap,ifname=$TAP,script=no,downscript=no" -no-reboot \
	-drive "if=none,id=images,file=$STATE/images.ext4,format=raw,cache=unsafe" -device virtio-blk-pci,drive=images,bus=pcie.0
until_ok 120 kubectl get node/$NODE
echo "registered after $(seconds) s"
until_ok 120 kubectl wait --for=condition=Ready node/$NODE --timeout=1s
echo "$NODE is ready after $(seconds) s"
