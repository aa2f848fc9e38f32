#!/bin/bash
# down.sh STATE: shuts the virtual machine down, up.sh's or plain.sh's; a control plane keeps running. Good at any point, also after a start that
# failed half-way.
. "$(dirname "$0")/common.sh"
[ -e "$STATE/vm-out" ] || { echo "no virtual machine in $STATE"; exit; }
read -r pid since 2>/dev/null <"$STATE/pids/vm" || pid=
running() { [ -n "$pid" ] && [ "$(started "$pid")" = "$since" ]; }
how="was not running"
if running; then
	how="killed"
	# Still booting, or hung: no shell answers, and there is nothing in it to be kept. Nor is there in a plain machine.
	if [ -f "$STATE/tap" ] && timeout 5 bash -c '. "$0"; guest poweroff' "$LAB/common.sh" "$STATE" >/dev/null 2>&1; then
		for _ in $(seq 200); do running || break; sleep .1; done
		running || how="shut down"
	fi
fi
stop vm
if [ -f "$STATE/tap" ]; then
	ip link del "$(cat "$STATE/tap")" 2>/dev/null || true
	rm "$STATE/tap"
	kubectl delete node/$NODE --wait=false >/dev/null 2>&1 || true
fi
rm -f "$STATE/vm-out"
echo "virtual machine $how"
