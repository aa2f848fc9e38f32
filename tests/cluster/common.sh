# Sourced by the other scripts; the first argument is the state directory.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "${1:?usage: $0 STATE}"/{log,pids,pki}
STATE=$(cd "$1" && pwd)
# The machine's name as a node. kubevirt.sh takes an empty one: then no node is told about KubeVirt.
NODE=${NODE-node-1}
SERVICE_CIDR=10.96.0.0/16
SERVICE_IP=10.96.0.1
POD_CIDR=10.88.0.0/24
SOCKET=$STATE/containerd/containerd.sock

kubectl() { "$STATE/bin/kube" kubectl --kubeconfig "$STATE/admin.kubeconfig" "$@"; }
ctr() { "$STATE/bin/ctr" -a "$SOCKET" -n k8s.io "$@"; }

# When a process began (field 22 of its stat), nothing for a zombie: a recorded pid can never mean another process.
started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" {print $20}'; }

start() { # NAME COMMAND...: the process records itself before it becomes COMMAND, so that none is forgotten however this script ends
	local name=$1
	shift
	(
		pid=$BASHPID
		echo "$pid $(started "$pid")" >"$STATE/pids/$name"
		exec setsid "$@" >"$STATE/log/$name.log" 2>&1 </dev/null
	) &
	until [ -s "$STATE/pids/$name" ]; do sleep .01; done
}

stop() { # NAME: ends the recorded process, if it is still that process
	local file=$STATE/pids/$1 pid since
	[ -f "$file" ] || return 0
	read -r pid since <"$file"
	for signal in TERM KILL; do
		[ -n "$since" ] && [ "$(started "$pid")" = "$since" ] || break
		kill -$signal "$pid" 2>/dev/null || true
		for _ in $(seq 50); do [ "$(started "$pid")" = "$since" ] || break; sleep .1; done
	done
	rm -f "$file"
}

keep() { # PID: all that is started here ends with that process, and STATE is deleted; takes down what others have left
	"$HERE/sweep.sh"
	echo "$1 $(started "$1")" >"$STATE/owner"
	start keeper "$HERE/keeper.sh" "$STATE" "$1"
}

until_ok() { # SECONDS COMMAND...
	local end=$((SECONDS + $1))
	shift
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt $end ] || { echo "gave up on: $*" >&2; return 1; }
		sleep .2
	done
}

kubeconfig() { # FILE TOKEN
	cat >"$1" <<-E
		apiVersion: v1
		kind: Config
		clusters: [{name: c, cluster: {server: "https://$NODE_IP:$API_PORT", certificate-authority: "$STATE/pki/ca.crt"}}]
		users: [{name: u, user: {token: "$2"}}]
		contexts: [{name: c, context: {cluster: c, user: u}}]
		current-context: c
	E
	chmod 600 "$1"
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }

sign() { # NAME SUBJECT USAGE [SAN]: STATE/pki/NAME.key and .crt, signed by the cluster's CA
	(
		cd "$STATE/pki"
		openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "$2" -keyout "$1.key" -out "$1.csr"
		openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out "$1.crt" \
			-extfile <(echo "extendedKeyUsage=$3"; [ -z "${4-}" ] || echo "subjectAltName=$4")
	) 2>/dev/null
}
