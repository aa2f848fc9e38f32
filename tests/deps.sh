#!/bin/bash
# deps.sh: installs what building and testing needs on Debian: packages (only those that are missing) and Rust targets. Go and rustup must be there.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

# For `cargo check` of the other architecture: ring compiles C in its build script.
case $(uname -m) in
x86_64) cross="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" ;;
aarch64) cross= ;;
esac
# The same for `kubectl gpuvirt` on Windows.
cross="$cross gcc-mingw-w64-x86-64"
mapfile -t packages < <(sort -u "$here/cluster/packages" "$here/lab/packages" && tr " " "\n" <<<"$cross")
mapfile -t missing < <(for package in "${packages[@]}"; do
	[ -z "$package" ] || dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || echo "$package"
done)
if [ ${#missing[@]} -gt 0 ]; then
	echo "installing: ${missing[*]}"
	[ "$(id -u)" = 0 ] || { echo "installing packages needs root" >&2; exit 1; }
	export DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}" >/dev/null
fi

command -v go >/dev/null || { echo "Go is missing: https://go.dev/dl, 1.26.6 or later, and /usr/local/go/bin in PATH" >&2; exit 1; }
command -v rustup >/dev/null || { echo "Rust is missing: https://rustup.rs" >&2; exit 1; }
for target in aarch64-unknown-linux-gnu x86_64-pc-windows-gnu; do
	rustup target list --installed | grep -qx "$target" || rustup target add "$target"
done
