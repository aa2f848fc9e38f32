#!/bin/bash
# sweep.sh: takes down what was left below /tmp when a test program and its keeper were killed together. up.sh calls it.
here=$(cd "$(dirname "$0")" && pwd)
for state in /tmp/gpuvirt-*; do
	[ -f "$state/owner" ] || continue
	(
		. "$here/common.sh" "$state"
		read -r pid since <"$state/owner"
		[ "$(started "$pid")" != "$since" ] || exit 0
		# Held by a keeper or another sweep that is at it.
		exec 9>"$state/kept"
		flock -n 9 || exit 0
		echo "taking down what a killed run left in $state"
		"$here/down.sh" "$state" && rm -rf "$state"
	)
done
