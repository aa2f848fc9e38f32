#!/bin/bash
# release.sh VERSION URL FILE...: prints the manifest for krew. Each FILE is kubectl-gpuvirt-OS-ARCH.tar.gz or .zip, as it lies below URL.
set -euo pipefail
version=${1:?usage: $0 VERSION URL FILE...} url=${2:?usage: $0 VERSION URL FILE...}
shift 2
[ $# -gt 0 ] || { echo "usage: $0 VERSION URL FILE..." >&2; exit 1; }
sed "s/{{version}}/$version/" "$(dirname "$0")/gpuvirt.yaml"
for file in "$@"; do
	name=$(basename "$file")
	[[ $name =~ ^kubectl-gpuvirt-(linux|darwin|windows)-(amd64|arm64)\.(tar\.gz|zip)$ ]] || { echo "$name is no name of an archive of a release" >&2; exit 1; }
	os=${BASH_REMATCH[1]} arch=${BASH_REMATCH[2]} suffix=
	[ "$os" != windows ] || suffix=.exe
	cat <<-END
		    - selector:
		        matchLabels:
		          os: $os
		          arch: $arch
		      uri: $url/$name
		      sha256: $(sha256sum "$file" | cut -d' ' -f1)
		      bin: kubectl-gpuvirt$suffix
	END
done
