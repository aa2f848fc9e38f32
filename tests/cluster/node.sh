#!/bin/bash
# node.sh STATE [IMAGE.tar...]: containerd, kubelet and kube-proxy make this machine the node "node-1".
# Imports BIN/images/*.tar and the further archives named.
. "$(dirname "$0")/common.sh"
. "$STATE/env"
shift
cd "$STATE"
[ ! -f host.propagation ] || { echo "$STATE has a node already" >&2; exit 1; }
mkdir -p containerd kubelet cni

# What changes on the host, for down.sh; complete before the first change.
sysctl vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops net.ipv4.ip_forward 2>/dev/null | sed 's/ = /=/' >host.sysctl
findmnt -no PROPAGATION / >host.propagation
mount --make-rshared /
# The kubelet's own places stay where node agents look for them, and still end with STATE.
mkdir -p /var/lib/kubelet
mount --bind kubelet /var/lib/kubelet

cat >cni/10-pods.conflist <<EOF
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{
  "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "$STATE/cni/ipam", "ranges": [[{"subnet": "$POD_CIDR"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
EOF
cat >containerd.toml <<EOF
version = 3
root = '$STATE/containerd/root'
state = '$STATE/containerd/state'
[grpc]
  address = '$SOCKET'
[plugins.'io.containerd.internal.v1.opt']
  path = '$STATE/containerd/opt'
[plugins.'io.containerd.nri.v1.nri']
  disable = true
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = 'localhost/pause:test'
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]
      BinaryName = '$STATE/nvidia/nvidia-container-runtime'
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['/usr/lib/cni']
    conf_dir = '$STATE/cni'
EOF
# What the container toolkit of a host would be: see there.
install -D -m 755 "$HERE/nvidia-container-runtime" "$STATE/nvidia/nvidia-container-runtime"
PATH=$STATE/bin:$PATH start containerd "$STATE/bin/containerd" -c "$STATE/containerd.toml"
until_ok 20 ctr version
for image in bin/images/*.tar "$@"; do ctr images import "$image" >>log/images.log 2>&1; done

cat >kubelet.yaml <<EOF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://$SOCKET
podLogsDir: $STATE/log/pods
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
makeIPTablesUtilChains: false
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $STATE/pki/ca.crt}}
evictionHard: {memory.available: 50Mi, nodefs.available: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100
EOF
start kubelet "$STATE/bin/kube" kubelet --config=kubelet.yaml --kubeconfig=kubelet.kubeconfig \
	--hostname-override=$NODE --node-ip="$NODE_IP"

cat >proxy.yaml <<EOF
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clientConnection: {kubeconfig: $STATE/proxy.kubeconfig}
hostnameOverride: $NODE
clusterCIDR: $POD_CIDR
conntrack: {maxPerCore: 0}
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
EOF
start kube-proxy "$STATE/bin/kube" kube-proxy --config=proxy.yaml
until_ok 60 kubectl wait --for=condition=Ready node/$NODE --timeout=1s
echo "$NODE is ready"
