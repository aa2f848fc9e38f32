#!/bin/bash
# nightly.sh [STEP...]: what is too long for `make test`, each step by its name; all of them without one. Goes on after a step
# that fails, and then fails itself.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
failed=()

step() { # NAME COMMAND...
	local name=$1 from=$SECONDS status=0
	shift
	[ ${#WANTED[@]} = 0 ] || [[ " ${WANTED[*]} " == *" $name "* ]] || return 0
	echo "── $name: $*"
	"$@" || status=$?
	echo "step $name: $((SECONDS - from)) s$([ $status = 0 ] || echo ", FAILED")"
	[ $status = 0 ] || failed+=("$name")
}
WANTED=("$@")

# Random machines under random crashes; optimised, since it is the number of cases that counts.
topologies() { PROPTEST_CASES=${PROPTEST_CASES:-10000} cargo test --locked --release -p vfio --lib -- topologies; }

step topologies topologies
step bench tests/bench.sh
step soak tests/soak.sh
step debian-kernel tests/lab/debian-kernel.sh
step real-holder tests/lab/real-holder.sh

[ ${#failed[@]} = 0 ] || { echo "failed steps: ${failed[*]}"; exit 1; }
