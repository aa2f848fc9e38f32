#!/bin/bash
# plain.sh STATE [PROGRAM...] [-- QEMU-ARGUMENT...]: boots the same machine alone: no cluster, no containerd, no kubelet, and more GPUs. The programs go to the guest's
# /usr/bin. It has no network but the shell's, so any number can run side by side. A reboot in the guest keeps its disk; down.sh ends it.
# OUT is the folder that build.sh filled, KERNEL another kernel than that one's. With OWNER set to a process, the machine ends with it, and STATE is deleted.
. "$(dirname "$0")/common.sh"
. "$LAB/machine.sh"
shift
[ ! -e "$STATE/vm-out" ] || { echo "$STATE has a virtual machine already; run down.sh first" >&2; exit 1; }
[ -z "${OWNER-}" ] || keep "$OWNER"

cards+=$(
	for function in 0 1 2 3 4; do identity 02:00.$function 26b9 030200 1851; done # L40S: the NVMe controller, for its virtual functions
	identity 04:01.0 1eb8 030200 12a2 # Tesla T4 behind a bridge to PCI, alone
	identity 06:01.0 1eb8 030200 12a2 # Tesla T4 behind another one, beside a network card
	for bus in 45 46; do identity $bus:00.0 1eb8 030200 12a2; done
	for bus in 85 86; do identity $bus:00.0 2330 030200 16c1; done
)
share 10.0.2.2 10.0.2.15 /usr/bin/kube
while [ $# -gt 0 ] && [ "$1" != -- ]; do
	cp "$1" "$VM/bin/"
	shift
done
# For a kubeconfig of an API server that is away: a client wants to have some authority.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=nobody -keyout /dev/null -out "$VM/ca.crt" 2>/dev/null
port=$(free_port)
echo "127.0.0.1/$port" >"$VM/shell"
more=("${@:2}")
for port_of in up0:d4 up0:d5 up1:d6 up1:d7; do
	name=${port_of#*:}
	more+=(-device "xio3130-downstream,id=$name,bus=${port_of%:*},chassis=2${name#d},slot=${name#d}" -device "edu,bus=$name")
done
for number in 5 6; do
	more+=(-device "pcie-root-port,id=rp$number,bus=pcie.0,chassis=$number,slot=$number" -device "pcie-pci-bridge,id=pci$number,bus=rp$number")
	more+=(-device "edu,bus=pci$number,addr=1.0")
done
more+=(-netdev user,id=foreign,restrict=on -device e1000,netdev=foreign,bus=pci6,addr=2.0,romfile=)
MEMORY=${MEMORY:-1024} boot "user,restrict=on,hostfwd=tcp:127.0.0.1:$port-10.0.2.15:2222" "${more[@]}"
until_ok 20 guest true
