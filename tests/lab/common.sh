# Sourced by the other scripts; the first argument is the state directory of a control plane.
LAB=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$LAB/../cluster/common.sh"
. "$STATE/env"
HOST_IP=10.87.0.1
GUEST_IP=10.87.0.2
VM=$STATE/vm

guest() { # COMMAND...: a root shell in the guest; its output and exit status
	local out status
	exec 9<>"/dev/tcp/$GUEST_IP/2222" || return 255
	printf '( %s\n) </dev/null 2>&1; printf "\\001%%s" $?; exit\n' "$*" >&9
	out=$(cat <&9)
	exec 9>&-
	printf %s "${out%$'\001'*}"
	[[ $out == *$'\001'* ]] || return 255
	status=${out##*$'\001'}
	return "${status%%[!0-9]*}" # what it left in the background may write later
}
