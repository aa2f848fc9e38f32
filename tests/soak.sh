#!/bin/bash
# soak.sh: what takes too long for every run of the tests: 200 restarts of a real kubelet (root; about five minutes).
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cluster_tools
cargo test --locked --test cluster -- --ignored --nocapture soak
