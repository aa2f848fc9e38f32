#!/bin/bash
# run.sh [quick|all]: runs the test rings, prints each one's time against its budget, and at the end the sum of all test counts.
# Stops at a build that fails; goes on after a ring that fails, and then fails itself.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
log=$(mktemp)
trap 'rm -f "$log" "$log.plain"' EXIT
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never}
failed=() warm=yes began=$SECONDS

ring() { # NAME BUDGET COMMAND...: seconds; a ring that fails is noted
	local name=$1 budget=$2 from=$SECONDS status=0 took
	shift 2
	echo "── $name: $*"
	"$@" 2>&1 | tee -a "$log" || status=$?
	took=$((SECONDS - from))
	echo "ring $name: $took s of budget $budget s$([ $took -le "$budget" ] || echo ", OVER BUDGET by $((took - budget)) s")$([ $status = 0 ] || echo ", FAILED")"
	[ $status = 0 ] || failed+=("$name")
	return $status
}
build() { # NAME BUDGET COMMAND...: as ring, but nothing after it makes sense without it
	local from=$SECONDS
	ring "$@" || finish
	[ $((SECONDS - from)) -lt 60 ] || warm=no
}

finish() {
	local total=$((SECONDS - began)) counts
	[ $warm = no ] || echo "in all, with nothing to build: $total s of budget $WARM s$([ $total -le "$WARM" ] || echo ", OVER BUDGET by $((total - WARM)) s")"
	[ ${#failed[@]} = 0 ] || echo "failed rings: ${failed[*]}"
	# A ring that failed without a test's verdict (a lint, a build) counts as one.
	counts=$(awk '/^test result:/ {passed += $4; failed += $6} END {print passed + 0, failed + 0}' "$log")
	read -r passed wrong <<<"$counts"
	[ "$wrong" -ge ${#failed[@]} ] || wrong=${#failed[@]}
	echo "$passed passed, $wrong failed"
	[ ${#failed[@]} = 0 ]
	exit
}

clippy() { cargo clippy --workspace --all-targets --locked -- -D warnings && cargo clippy --locked --test cluster --test lab --test chain --test gpu -- -D warnings; }
unit() { cargo test --workspace --locked; }
other_architecture() { cargo check --workspace --locked --target aarch64-unknown-linux-gnu; }
# What a person has on a laptop. macOS is not among it: ring's C takes a compiler for it.
windows() { cargo check --locked --bin kubectl-gpuvirt --target x86_64-pc-windows-gnu; }
# Both profiles that the rings need of the dependencies, so that the rings' times are their own. (`set -e` is off inside `||`.)
debug() { cargo check --workspace --all-targets --locked && cargo test --workspace --all-targets --locked --no-run && cargo test --locked --test cluster --test lab --test chain --no-run; }
rust() { debug && release && other_architecture && windows; }
# Machines without a cluster beside the node: both wait more than they work.
lab() {
	local status=0 plain
	cargo test --locked --test lab plain:: >"$log.plain" 2>&1 &
	plain=$!
	# One after the other by name, which are chosen so that the node changes its mode seldom.
	cargo test --locked --test lab -- --skip plain:: --test-threads=1 || status=$?
	wait "$plain" || status=$?
	cat "$log.plain"
	return $status
}
chart() { "$GPUVIRT_CLUSTER_BIN/helm" lint --strict charts/gpuvirt; }

case ${1:-all} in
quick)
	WARM=60
	build rust 480 debug
	ring fmt 10 cargo fmt --all --check || true
	ring clippy 40 clippy || true
	ring unit 40 unit || true
	;;
all)
	WARM=900
	build packages 180 tests/deps.sh
	build go 720 cluster_tools
	build kernel 600 lab_tools
	build rust 720 rust
	build images 30 images
	ring fmt 10 cargo fmt --all --check || true
	ring clippy 120 clippy || true
	ring unit 120 unit || true
	ring chain 20 cargo test --locked --test chain || true
	ring chart 10 chart || true
	ring cluster 720 cargo test --locked --test cluster || true
	ring lab 480 lab || true
	;;
*)
	echo "usage: $0 [quick|all]" >&2
	exit 2
	;;
esac
finish
