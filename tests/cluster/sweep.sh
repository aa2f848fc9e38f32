#!/bin/bash
# sweep.sh: takes down what was left below /tmp when a test program and its keeper were killed together, and waits for keepers that are at
# it: a node that is being taken down has routes, links and mounts that the next one needs. up.sh calls it.
here=$(cd "$(dirname "$0")" && pwd)
for state in /tmp/gpuvirt-*; do
	[ -f "$state/owner" ] || continue
	(
		. "$here/common.sh" "$state"
		read -r pid since <"$state/owner"
		[ "$(started "$pid")" != "$since" ] || exit 0
		# Held by a keeper or another sweep until all is gone.
		exec 9>"$state/kept"
		flock -w 120 9 || { echo "$state is still being taken down" >&2; exit 0; }
		[ -f "$state/owner" ] || exit 0
		echo "taking down what a killed run left in $state"
		"$here/down.sh" "$state" && rm -rf "$state"
	)
done
