#!/bin/sh
# Makes v1beta1.rs from api.proto. Needs protoc (Debian: protobuf-compiler) and cargo; the build of gpuvirt needs neither this nor protoc.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/src"
cat >"$work/Cargo.toml" <<'TOML'
[package]
name = "generate"
version = "0.0.0"
edition = "2024"
[dependencies]
tonic-prost-build = { version = "=0.14.9", default-features = false }
TOML
cat >"$work/src/main.rs" <<'RUST'
fn main() -> std::io::Result<()> {
    let dir = std::env::args().nth(1).expect("should be called with the folder of api.proto");
    tonic_prost_build::configure()
        .out_dir(&dir)
        .build_transport(false)
        .emit_rerun_if_changed(false)
        .compile_protos(&[format!("{dir}/api.proto")], &[dir])
}
RUST
CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$work/target}" cargo run --quiet --manifest-path "$work/Cargo.toml" -- "$here"
{
    echo '// Made by generate.sh from api.proto (prost 0.14, tonic 0.14, btree_map off, no transport helpers). Do not edit.'
    cat "$here/v1beta1.rs"
} >"$work/out.rs"
mv "$work/out.rs" "$here/v1beta1.rs"
