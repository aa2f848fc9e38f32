#!/bin/bash
# gpuvirt.sh OUT.tar NAME:TAG BINARY: the product's image, from this machine's glibc, which BINARY was linked against. Prints its size.
# Libraries are there whole, not only what BINARY names: the node's NVML and libcuda are opened with dlopen and bring their own needs.
set -euo pipefail
out=${1:?usage: $0 OUT.tar NAME:TAG BINARY} name=$2 binary=$3
LIBRARIES="libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libresolv.so.2 libgcc_s.so.1"

root=$(mktemp -d)
trap 'rm -r "$root"' EXIT
chmod 755 "$root"
mkdir -p "$root"/usr/bin "$root"/etc/ld.so.conf.d "$root"/var/cache/ldconfig
mkdir -m 1777 "$root/tmp"
install -m 755 "$binary" "$root/usr/bin/gpuvirt"

loader=$(ldd "$binary" | grep -o '/[^ ]*/ld-linux[^ ]*')
folder=$(dirname "$(ldd "$binary" | sed -n 's/.*libc\.so\.6 => \([^ ]*\) .*/\1/p')")
install -D "$loader" "$root/$loader"
for library in $LIBRARIES; do install -D -m 755 "$folder/$library" "$root/$folder/$library"; done
missing=$(ldd "$binary" | grep -o '=> [^ ]*' | cut -c4- | while read -r library; do [ -e "$root/$library" ] || echo "$library"; done)
[ -z "$missing" ] || { echo "the image lacks what $binary is linked against: $missing" >&2; exit 1; }

# The container toolkit adds its folders here and rebuilds the cache when it injects the node's driver libraries.
echo 'include /etc/ld.so.conf.d/*.conf' >"$root/etc/ld.so.conf"
echo "$folder" >"$root/etc/ld.so.conf.d/glibc.conf"
ldconfig -X -r "$root"
rm -f "$root/var/cache/ldconfig/aux-cache"
printf 'root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n' >"$root/etc/passwd"
printf 'root:x:0:\nnonroot:x:65532:\n' >"$root/etc/group"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"

mkdir -p "$(dirname "$out")"
"$(dirname "$0")/mkimg.py" "$out" "$name" "$root" /usr/bin/gpuvirt
mib() { echo "$(($(stat -c %s "$1") * 10 / 1048576))" | sed 's/.$/.&/; s/^\./0./'; }
echo "$name: $(mib "$out") MiB, of which the binary $(mib "$root/usr/bin/gpuvirt") MiB"
