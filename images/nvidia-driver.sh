#!/bin/bash
# nvidia-driver.sh OUT.tar NAME:TAG NVIDIA.KO: a stand-in for NVIDIA's driver image, with the lab's test-only kernel module. Not for real nodes.
set -euo pipefail
out=${1:?usage: $0 OUT.tar NAME:TAG NVIDIA.KO} name=$2 module=$3
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
install -D -m 755 -t "$folder/usr/bin" "$here"/nvidia-driver/nvidia-{driver,smi}
install -D -m 644 "$module" "$folder/usr/lib/nvidia/nvidia.ko"
mkdir -p "$(dirname "$out")"
"$here/box.sh" "$out" "$name" "nvidia-driver init" "$folder"
