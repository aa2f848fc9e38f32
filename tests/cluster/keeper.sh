#!/bin/bash
# keeper.sh STATE PID: waits for the end of PID, then takes down what was started in STATE and deletes it. up.sh starts it.
. "$(dirname "$0")/common.sh"
cd /
# While this lives no sweep takes STATE for forsaken.
exec 9>"$STATE/kept"
flock 9
tail --pid="$2" -f /dev/null
rm -f "$STATE/pids/keeper"
"$HERE/down.sh" "$STATE" || true
rm -rf "$STATE"
