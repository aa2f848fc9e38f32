#!/bin/bash
# build.sh OUT: builds all binaries and images into OUT; what has unchanged inputs is skipped.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
IMAGES=$HERE/../../images
mkdir -p "${1:?usage: $0 OUT}/images"
OUT=$(cd "$1" && pwd)

for need in go gcc etcd runc nft busybox openssl python3 /usr/lib/cni/bridge; do
	command -v "$need" >/dev/null || missing="${missing-} $need"
done
[ -z "${missing-}" ] || { echo "missing:$missing (the packages are in $HERE/packages)" >&2; exit 1; }

step() { # NAME INPUT...: runs the function NAME unless it and the inputs are those of the last time
	local name=$1 stamp=$OUT/.$1 began=$SECONDS inputs
	shift
	inputs=$({ declare -f "$name"; find "$@" -type f | sort | xargs cat; } | sha256sum)
	[ "$(cat "$stamp" 2>/dev/null)" != "$inputs" ] || { echo "$name: up to date"; return; }
	rm -f "$stamp"
	$name
	echo "$inputs" >"$stamp"
	echo "$name: built in $((SECONDS - began)) s"
}
# A folder with a Go module is the step of that name; the Go that builds it counts as an input.
module() { (cd "$HERE/$1" && go version) >"$OUT/.go" && step "$1" "$HERE/$1" "$OUT/.go"; }
static() { CGO_ENABLED=0 go build -trimpath -buildvcs=false "$@"; }

kube() {
	local version
	cd "$HERE/kube"
	version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
	static -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" -o "$OUT/kube" .
}
containerd() { cd "$HERE/containerd" && static -ldflags '-s -w' -tags 'no_btrfs no_devmapper no_zfs no_aufs' -o "$OUT/" tool; }
helm() { cd "$HERE/helm" && static -ldflags '-s -w' -o "$OUT/" tool; }
helm3() { cd "$HERE/helm3" && static -ldflags '-s -w' -o "$OUT/helm3" tool; }
kubevirt() {
	cd "$HERE/kubevirt"
	static -ldflags '-s -w' -o "$OUT/" ./manifests tool
	# libvirt's Go package without cgo lacks constants that the launcher's code names; with this tag it needs no libvirt to build or start.
	CGO_ENABLED=1 go build -trimpath -buildvcs=false -tags libvirt_dlopen,osusergo,netgo \
		-ldflags '-s -w -linkmode=external -extldflags "-static -w"' -o "$OUT/launcher" ./launcher
}
images() {
	local folder
	folder=$(mktemp -d)
	install -D "$OUT/launcher" "$folder/usr/bin/virt-launcher-monitor"
	"$IMAGES/box.sh" "$OUT/images/pause.tar" localhost/pause:test "/bin/sleep 2147483647"
	"$IMAGES/box.sh" "$OUT/images/box.tar" localhost/box:test /bin/sh
	"$IMAGES/box.sh" "$OUT/images/virt-launcher.tar" localhost/virt-launcher:test /usr/bin/virt-launcher-monitor "$folder"
	rm -r "$folder"
}

for name in kube containerd helm helm3 kubevirt; do module $name; done
step images "$IMAGES/box.sh" "$IMAGES/mkimg.py" "$OUT/launcher"
