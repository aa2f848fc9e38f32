#!/bin/bash
# up.sh STATE [IMAGE.tar...]: boots a virtual machine as node "node-1" of the control plane in STATE, and waits until it is Ready.
# The control plane may be starting still: what the machine is given of it is waited for.
# OUT is the folder that build.sh filled. The images of BIN named in IMAGES (default: pause box) and the further archives are imported.
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
for image in ${IMAGES-pause box}; do cp "$STATE/bin/images/$image.tar" "$VM/images/"; done
for image in "$@"; do cp "$image" "$VM/images/"; done
cp "$STATE/pki/ca.crt" "$VM/"
for name in kubelet proxy; do sed "s#$STATE/pki#/host#" "$STATE/$name.kubeconfig" >"$VM/$name.kubeconfig"; done

# The guest reaches the API server at the host's own address; the routes let the host reach pods, and Services through the guest's kube-proxy.
echo "$TAP" >"$STATE/tap"
ip tuntap add dev "$TAP" mode tap
ip addr add $HOST_IP/24 dev "$TAP"
ip link set "$TAP" up
ip route add $POD_CIDR via $GUEST_IP
ip route add $SERVICE_CIDR via $GUEST_IP

boot "tap,ifname=$TAP,script=no,downscript=no" -no-reboot
until_ok 120 kubectl get node/$NODE
echo "registered after $(seconds) s"
until_ok 120 kubectl wait --for=condition=Ready node/$NODE --timeout=1s
echo "$NODE is ready after $(seconds) s"
until_ok 120 grep -q images "$VM/log/times"
echo "images imported after $(seconds) s"
