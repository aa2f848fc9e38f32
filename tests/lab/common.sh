# Sourced by the other scripts; the first argument is the state directory of a control plane, or of a plain machine.
LAB=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$LAB/../cluster/common.sh"
[ ! -f "$STATE/env" ] || . "$STATE/env"
VM=$STATE/vm

guest() { # COMMAND...: a root shell in the guest; its output and exit status
	local out status
	exec 9<>"/dev/tcp/$(cat "$VM/shell")" || return 255
	printf '( %s\n) </dev/null 2>&1; printf "\\001%%s" $?; exit\n' "$*" >&9
	out=$(cat <&9)
	exec 9>&-
	printf %s "${out%$'\001'*}"
	[[ $out == *$'\001'* ]] || return 255
	status=${out##*$'\001'}
	return "${status%%[!0-9]*}" # what it left in the background may write later
}
