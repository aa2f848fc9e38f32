# Sourced by the scripts here: where things are. All of it can be set from outside.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
CACHE=${GPUVIRT_CACHE:-$HOME/.cache/gpuvirt}
# Read by the Rust harnesses of tests/cluster and tests/lab.
export GPUVIRT_CLUSTER_BIN=$CACHE/cluster
export GPUVIRT_LAB=${GPUVIRT_LAB:-$CACHE/lab}
export GPUVIRT_RELEASE=${GPUVIRT_RELEASE:-$TARGET/release}
export GPUVIRT_IMAGE_TAR=$TARGET/images/gpuvirt.tar
export GPUVIRT_DRIVER_TAR=$TARGET/images/nvidia-driver.tar
export GPUVIRT_VGPU_MANAGER_TAR=$TARGET/images/vgpu-manager.tar

cluster_tools() { tests/cluster/build.sh "$GPUVIRT_CLUSTER_BIN"; }
lab_tools() { BIN=$GPUVIRT_CLUSTER_BIN tests/lab/build.sh "$GPUVIRT_LAB"; }
release() { cargo build --release --locked && cargo build --release --locked -p vfio --example switch; }
images() {
	images/gpuvirt.sh "$GPUVIRT_IMAGE_TAR" localhost/gpuvirt:test "$TARGET/release/gpuvirt" &&
		images/nvidia-driver.sh "$GPUVIRT_DRIVER_TAR" localhost/nvidia-driver:test-ubuntu24.04 "$GPUVIRT_LAB/nvidia.ko" &&
		images/nvidia-driver.sh "$GPUVIRT_VGPU_MANAGER_TAR" localhost/vgpu-manager:test-ubuntu24.04 "$GPUVIRT_LAB"/{nvidia,nvidia_vgpu_vfio,mdev}.ko
}
