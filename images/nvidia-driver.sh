#!/bin/bash
# nvidia-driver.sh OUT.tar NAME:TAG NVIDIA.KO [MODULE.KO...]: a stand-in for NVIDIA's driver image, with the lab's test-only kernel module; with
# nvidia_vgpu_vfio.ko and mdev.ko for that of its vGPU manager. Not for real nodes.
set -euo pipefail
out=${1:?usage: $0 OUT.tar NAME:TAG NVIDIA.KO [MODULE.KO...]} name=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
install -D -m 755 -t "$folder/usr/bin" "$here"/nvidia-driver/nvidia-{driver,smi}
install -D -m 644 -t "$folder/usr/lib/nvidia" "$@"
mkdir -p "$(dirname "$out")"
"$here/box.sh" "$out" "$name" "nvidia-driver init" "$folder"
