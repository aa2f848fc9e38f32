#!/bin/bash
# down.sh STATE: shuts the node's virtual machine down; the control plane keeps running. Good at any point, also after a start that failed half-way.
. "$(dirname "$0")/common.sh"
[ -f "$STATE/tap" ] || { echo "no virtual machine in $STATE"; exit; }
read -r pid since 2>/dev/null <"$STATE/pids/vm" || pid=
running() { [ -n "$pid" ] && [ "$(started "$pid")" = "$since" ]; }
how="was not running"
if running; then
	how="killed"
	# Still booting, or hung: no shell answers, and there is nothing in it to be kept.
	if timeout 5 bash -c '. "$0"; guest poweroff' "$LAB/common.sh" "$STATE" >/dev/null 2>&1; then
		for _ in $(seq 200); do running || break; sleep .1; done
		running || how="shut down"
	fi
fi
stop vm
ip link del "$(cat "$STATE/tap")" 2>/dev/null || true
rm "$STATE/tap"
kubectl delete node/$NODE --wait=false >/dev/null 2>&1 || true
echo "virtual machine $how"
