#!/bin/bash
# up.sh STATE: etcd, kube-apiserver, kube-controller-manager and kube-scheduler as plain processes.
# BIN is the folder that build.sh filled. Afterwards STATE/admin.kubeconfig is good for kubectl, helm and tests.
# ONLY=api leaves controllers and scheduler out. With AUDIT set to a user, that user's requests are in STATE/log/audit.log.
# With OWNER set to a process, all is taken down and STATE deleted once that process has ended, however it ended.
. "$(dirname "$0")/common.sh"
ln -sfn "$(cd "${BIN:?the folder that build.sh filled}" && pwd)" "$STATE/bin"
[ -z "$(ls "$STATE/pids")" ] || { echo "$STATE is in use; run down.sh first" >&2; exit 1; }
# The kubelet's, containerd's and QEMU's sockets lie below it, and a socket's path has at most 107 characters.
[ ${#STATE} -le 60 ] || { echo "$STATE is too long a path for the sockets in it: take one of at most 60 characters" >&2; exit 1; }
[ -z "${OWNER-}" ] || keep "$OWNER"

NODE_IP=${NODE_IP:-$(ip -4 route get 192.0.2.1 2>/dev/null | sed -n 's/.* src \([0-9.]*\).*/\1/p')}
API_PORT=$(free_port)
printf 'NODE_IP=%s\nAPI_PORT=%s\n' "${NODE_IP:?no IPv4 address found, set NODE_IP}" "$API_PORT" >"$STATE/env"

# One CA: the API server's serving certificate, its client certificates for kubelets and for aggregated APIs.
cd "$STATE/pki"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=test-ca -keyout ca.key -out ca.crt 2>/dev/null
sign apiserver /CN=kube-apiserver serverAuth "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost,IP:127.0.0.1,IP:$NODE_IP,IP:$SERVICE_IP"
sign kubelet-client /O=system:masters/CN=kube-apiserver clientAuth
sign aggregator /CN=aggregator clientAuth
openssl genrsa -out sa.key 2048 2>/dev/null

token() { openssl rand -hex 16; }
ADMIN=$(token) KUBELET=$(token) PROXY=$(token)
cat >tokens.csv <<EOF
$ADMIN,admin,admin,"system:masters"
$KUBELET,system:node:$NODE,$NODE,"system:nodes"
$PROXY,system:kube-proxy,kube-proxy
EOF
kubeconfig "$STATE/admin.kubeconfig" "$ADMIN"
kubeconfig "$STATE/kubelet.kubeconfig" "$KUBELET"
kubeconfig "$STATE/proxy.kubeconfig" "$PROXY"

ETCD=http://127.0.0.1:$(free_port) PEER=http://127.0.0.1:$(free_port)
start etcd etcd --data-dir "$STATE/etcd" --unsafe-no-fsync \
	--listen-client-urls "$ETCD" --advertise-client-urls "$ETCD" \
	--listen-peer-urls "$PEER" --initial-advertise-peer-urls "$PEER" --initial-cluster "default=$PEER"
audit=()
if [ -n "${AUDIT-}" ]; then
	cat >"$STATE/audit.yaml" <<-E
		{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
		 "rules": [{"level": "Metadata", "users": ["$AUDIT"]}, {"level": "None"}]}
	E
	audit=(--audit-policy-file="$STATE/audit.yaml" --audit-log-path="$STATE/log/audit.log")
fi
# Webhooks and aggregated APIs by their endpoints: a control plane without a node has no kube-proxy for cluster IPs.
start kube-apiserver "$STATE/bin/kube" kube-apiserver --etcd-servers="$ETCD" \
	--bind-address="$NODE_IP" --advertise-address="$NODE_IP" --secure-port="$API_PORT" --service-cluster-ip-range=$SERVICE_CIDR \
	--tls-cert-file=apiserver.crt --tls-private-key-file=apiserver.key --client-ca-file=ca.crt \
	--token-auth-file=tokens.csv --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged \
	--enable-aggregator-routing --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=sa.key --service-account-signing-key-file=sa.key \
	--kubelet-client-certificate=kubelet-client.crt --kubelet-client-key=kubelet-client.key --kubelet-preferred-address-types=InternalIP \
	--requestheader-client-ca-file=ca.crt --requestheader-allowed-names=aggregator --requestheader-username-headers=X-Remote-User \
	--requestheader-group-headers=X-Remote-Group --requestheader-extra-headers-prefix=X-Remote-Extra- \
	--proxy-client-cert-file=aggregator.crt --proxy-client-key-file=aggregator.key "${audit[@]}"
until_ok 60 kubectl get --raw /readyz
[ "${ONLY-}" != api ] || { echo "API server up: KUBECONFIG=$STATE/admin.kubeconfig"; exit; }
# Nodes that a test plays have no kubelet that says every few seconds that it lives.
start kube-controller-manager "$STATE/bin/kube" kube-controller-manager --kubeconfig="$STATE/admin.kubeconfig" --leader-elect=false --secure-port=0 \
	--node-monitor-grace-period=1h \
	--use-service-account-credentials --service-account-private-key-file=sa.key --root-ca-file=ca.crt \
	--cluster-signing-cert-file=ca.crt --cluster-signing-key-file=ca.key
start kube-scheduler "$STATE/bin/kube" kube-scheduler --kubeconfig="$STATE/admin.kubeconfig" --leader-elect=false --secure-port=0
until_ok 30 kubectl -n default get serviceaccount default
echo "control plane up: KUBECONFIG=$STATE/admin.kubeconfig"
