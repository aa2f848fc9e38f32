# The commands of this repository; what they do is in the scripts named here. `make help` lists them.
SHELL := /bin/bash
RUN := . tests/env.sh;
IMAGE ?= localhost/gpuvirt:test
HELM ?= $(shell command -v helm || echo $${GPUVIRT_CACHE:-$$HOME/.cache/gpuvirt}/cluster/helm)

.DEFAULT_GOAL := help
.PHONY: help deps tools build kubectl image check test test-gpu bench nightly soak demo demo-down install chart generate

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

deps: ## install the Debian packages and the Rust target that building and testing need (root)
	@tests/deps.sh

tools: deps ## build the test cluster's programs and the lab's kernel into ~/.cache/gpuvirt (20 minutes, once)
	@$(RUN) cluster_tools && lab_tools

build: ## build the release binary
	@$(RUN) release

kubectl: ## target/release/kubectl-gpuvirt, the plugin for kubectl; prints its size
	cargo build --release --locked --bin kubectl-gpuvirt
	@ls -l target/release/kubectl-gpuvirt | awk '{printf "kubectl-gpuvirt: %.1f MiB\n", $$5 / 1048576}'

image: build ## target/images/gpuvirt.tar: the product's image, without Docker; prints its size; IMAGE=name:tag (see also Containerfile)
	@$(RUN) images/gpuvirt.sh "$$GPUVIRT_IMAGE_TAR" "$(IMAGE)" "$$TARGET/release/gpuvirt"

check: ## the quick ring: format, lints, unit tests; no cluster, no root
	@tests/run.sh quick

test: ## all rings: the quick one, a real control plane with a real kubelet, and the lab node (root)
	@tests/run.sh all

test-gpu: ## the checks of a container node on this machine's own GPUs and driver; skips aloud where there are none (5 minutes)
	@$(RUN) timeout 300 cargo test --locked --test gpu -- --nocapture

bench: ## benchmarks against what they may take; FILTER=holders, or FILTER=scale NODES=5000 for the operator with played nodes (root)
	@NODES=$(NODES) KEEP=$(KEEP) tests/bench.sh "$(FILTER)"

nightly: ## what is too long for `make test`; STEP=topologies runs one step
	@tests/nightly.sh $(STEP)

soak: ## 200 restarts of a real kubelet: the devices are back after each (root, five minutes)
	@tests/soak.sh

demo: ## the main job on a real control plane and a node with a real IOMMU; DOWN=1 ends it by itself, FLIPS=10 measures (root)
	@tests/demo.sh

demo-down: ## end what `make demo` left running
	@tests/demo.sh down

install: ## install or upgrade the chart in the cluster that KUBECONFIG names; ARGS="--set …" goes to helm
	@: "$${KUBECONFIG:?names the cluster to install into}"
	$(HELM) upgrade --install gpuvirt charts/gpuvirt --namespace gpuvirt --create-namespace --wait --timeout 5m $(ARGS)

chart: ## target/chart/gpuvirt-VERSION.tgz, for `helm push … oci://REGISTRY/PATH`; PUSH=oci://REGISTRY/PATH does that, too
	$(HELM) lint --strict charts/gpuvirt
	$(HELM) package charts/gpuvirt --destination target/chart
	$(if $(PUSH),$(HELM) push target/chart/gpuvirt-$$(sed -n 's/^version: //p' charts/gpuvirt/Chart.yaml).tgz $(PUSH))

generate: ## write what is made from other files: the CRDs' YAML, the chart's keys and values, the references in docs
	cargo run --quiet --locked -- crds --write crds/generated
	cargo run --quiet --locked --example chart
	cargo run --quiet --locked --example kubectl_page
	cargo run --quiet --locked --example reference
