#!/bin/bash
# box.sh OUT.tar NAME:TAG ENTRYPOINT [FOLDER]: an image of busybox, with what is in FOLDER on top. ENTRYPOINT is split at spaces.
set -euo pipefail
out=${1:?usage: $0 OUT.tar NAME:TAG ENTRYPOINT [FOLDER]} name=$2 entrypoint=$3 folder=${4-}
root=$(mktemp -d)
trap 'rm -r "$root"' EXIT
chmod 755 "$root"
mkdir -p "$root"/{bin,usr/bin}
mkdir -m 1777 "$root/tmp"
cp "$(command -v busybox)" "$root/bin/busybox"
for applet in $(busybox --list); do [ -e "$root/bin/$applet" ] || ln -s busybox "$root/bin/$applet"; done
[ -z "$folder" ] || cp -r "$folder/." "$root/"
# shellcheck disable=SC2086 # the entrypoint's words
"$(dirname "$0")/mkimg.py" "$out" "$name" "$root" $entrypoint
