#!/bin/bash
# down.sh STATE: ends what the other scripts started from STATE, ../lab's node too, and takes back what they changed on the host.
# Good at any point: after a start that failed half-way, and a second time.
[ -d "${1:?usage: $0 STATE}" ] || { echo "nothing in $1"; exit; }
. "$(dirname "$0")/common.sh"
cd "$STATE"

stop keeper
[ ! -e vm-out ] || "$HERE/../lab/down.sh" "$STATE"
# Without controllers nothing comes back, so the kubelet can tear the pods down properly.
for name in virt-api virt-controller kube-controller-manager kube-scheduler; do stop $name; done
if [ -f pids/kubelet ]; then
	kubectl delete pods -A --all --grace-period=1 --timeout=20s >/dev/null 2>&1 || true
	stop kubelet
	stop kube-proxy
	for id in $(ctr tasks ls -q 2>/dev/null); do ctr tasks rm -f "$id" >/dev/null 2>&1 || true; done
fi
for name in store containerd kube-apiserver etcd; do stop $name; done
# A shim outlives containerd; ours are those that serve our socket.
for proc in /proc/[0-9]*; do
	tr '\0' ' ' 2>/dev/null <"$proc/cmdline" | grep -q "containerd-shim.* -address $SOCKET" && kill "${proc#/proc/}" || true
done

unmount_below() { awk '{print $5}' /proc/self/mountinfo | grep "^$1\(/\|$\)" | sort -r | while read -r mounted; do umount -l "$mounted" 2>/dev/null || true; done || true; }
[ ! -f host.propagation ] || unmount_below /var/lib/kubelet
unmount_below "$STATE"
if [ -f host.propagation ]; then
	[ "$(cat host.propagation)" != private ] || mount --make-rprivate /
	sysctl -qp host.sysctl
	"$STATE/bin/kube" kube-proxy --cleanup >log/kube-proxy-cleanup.log 2>&1 || true
	ip link del cni0 2>/dev/null || true
	find /sys/fs/cgroup/*/kubepods /sys/fs/cgroup/kubepods -depth -type d -exec rmdir {} \; 2>/dev/null || true
	find /var/log/containers -lname "$STATE/*" -delete 2>/dev/null || true
	{ grep -rls "$STATE/" /var/lib/cni/results || true; } | xargs -r rm -f
	rmdir --ignore-fail-on-non-empty /run/containerd/{runc/k8s.io,runc,s,} /var/lib/cni/{results,} /var/log/containers /var/lib/kubelet 2>/dev/null || true
	rm host.propagation host.sysctl
fi
echo "down; $STATE may be deleted"
