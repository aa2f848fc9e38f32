#!/bin/bash
# bench.sh [FILTER]: runs the benchmarks of all crates and compares the means with what they may take; without a filter, or with `scale`, the
# operator with NODES played nodes (1000), compared with an earlier run (KEEP=1 makes this one it; root, the test cluster's tools).
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# Name as Criterion files it, and milliseconds.
BUDGETS="
observe 16 GPUs with 256 VFs on disk|50
plan 16 GPUs with 256 VFs|1
holders among 2000 processes with 50 descriptors on disk|150
holders among 2000 processes with 50 descriptors of the kernel|150
preferred allocation of 16 GPUs/1|1
preferred allocation of 16 GPUs/8|1
preferred allocation of 16 GPUs/16|1
"

scale() {
	ONLY=api AUDIT=system:serviceaccount:gpuvirt:gpuvirt-operator NODES=${NODES:-1000} KEEP=${KEEP-} cargo bench --locked --bench scale
}
[ "${1-}" != scale ] || { scale; exit; }

rm -rf "$TARGET/criterion"
cargo bench --workspace --locked --features vfio/testing --bench '*' -- "${1:-}"
echo
over=0
while IFS='|' read -r name budget; do
	estimates=$TARGET/criterion/$name/new/estimates.json
	[ -n "$name" ] && [ -f "$estimates" ] || continue
	took=$(sed 's/.*"mean":{[^}]*},"point_estimate":\([0-9.e+]*\).*/\1/' "$estimates")
	verdict=$(awk -v took="$took" -v budget="$budget" 'BEGIN {printf "%.2f ms of %s ms%s", took / 1e6, budget, took / 1e6 > budget ? ", OVER BUDGET" : ""}')
	echo "$name: $verdict"
	[[ $verdict != *OVER* ]] || over=1
done <<<"$BUDGETS"
[ -n "${1-}" ] || scale || over=1
exit $over
