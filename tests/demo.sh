#!/bin/bash
# demo.sh [down]: the main job on real parts. Builds, starts a control plane and the lab's node, installs the chart, gives the node's GPUs
# to virtual machines by a label, lets a pod and KubeVirt's VMs have some, and takes them back. Leaves it all up; `demo.sh down` or DOWN=1 ends it.
# FLIPS=N: N more label flips each way, with median and worst.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
STATE=/tmp/gpuvirt-demo
NODE=node-1
LABEL=nvidia.com/gpu.workload.config
T4=nvidia.com/TU104GL_TESLA_T4
H100=nvidia.com/GH100_H100_SXM5_80GB
export KUBECONFIG=$STATE/admin.kubeconfig

kubectl() { "$GPUVIRT_CLUSTER_BIN/kube" kubectl "$@"; }
helm() { "$GPUVIRT_CLUSTER_BIN/helm" "$@"; }
guest() { tests/lab/guest.sh "$STATE" "$@"; }
down() { tests/cluster/down.sh "$STATE" && rm -rf "$STATE"; }
[ "${1-}" != down ] || { down; exit; }

milliseconds() { echo $(($(date +%s%N) / 1000000)); }
as_seconds() { printf '%d.%02d s' $(($1 / 1000)) $(($1 % 1000 / 10)); }
step() { # SENTENCE COMMAND...
	local what=$1 from
	from=$(milliseconds)
	shift
	printf '\n\033[1m── %s\033[0m\n' "$what"
	"$@"
	printf '\033[2m   took %s\033[0m\n' "$(as_seconds $(($(milliseconds) - from)))"
}
field() { kubectl wait --timeout="${WAIT:-120s}" --for=jsonpath="$2=$3" "$1" >/dev/null; } # OBJECT PATH VALUE: waits until it is so

ended() {
	local status=$?
	if [ "${DOWN-}" = 1 ]; then
		down
	elif [ $status != 0 ]; then
		echo "failed; what is up stays for a look: export KUBECONFIG=$KUBECONFIG, logs in $STATE/log and $STATE/vm/log; make demo-down ends it" >&2
	fi
}

builds() {
	tests/deps.sh
	cluster_tools
	lab_tools
	release
	images
}
start() {
	[ ! -d "$STATE" ] || down
	BIN=$GPUVIRT_CLUSTER_BIN tests/cluster/up.sh "$STATE"
	OUT=$GPUVIRT_LAB IMAGES="pause box virt-launcher" tests/lab/up.sh "$STATE" "$GPUVIRT_IMAGE_TAR" "$GPUVIRT_DRIVER_TAR"
}
install() {
	helm install gpuvirt charts/gpuvirt --namespace gpuvirt --create-namespace --values tests/lab/values.yaml --set metrics.mode=plain --wait --timeout 3m \
		>/dev/null 2> >(grep -v level=INFO >&2) # it says that the chart's CRDs are links
	kubectl wait --for=create "gpunode/$NODE" --timeout=60s >/dev/null
}
reached() { # MODE DRIVER: the operator says that the node serves it, the agent that the kernel shows it
	field "gpunode/$NODE" '{.status.operator.serving}' "$1"
	field "gpunode/$NODE" '{.status.agent.summary.driver}' "$2"
	field "gpunode/$NODE" '{.status.operator.ready}' True
}
to_vm() {
	kubectl label --overwrite "node/$NODE" $LABEL=vm-passthrough >/dev/null
	field "node/$NODE" "{.status.allocatable.${T4/./\\.}}" 2
	reached vm-passthrough vfio-pci
}
to_container() {
	kubectl label --overwrite "node/$NODE" $LABEL=container >/dev/null
	reached container nvidia
	field "node/$NODE" "{.status.allocatable.${T4/./\\.}}" 0
}
drivers() { # what the kernel shows, for the GPUs and their companions
	guest 'for d in /sys/bus/pci/devices/*; do
		[ "$(cat $d/vendor)" != 0x10de ] || echo "   ${d##*/}  $(cat $d/device) class $(cat $d/class)  group $(basename $(readlink $d/iommu_group))  driver $(basename $(readlink $d/driver || echo none))"
	done'
}
allocatable() { kubectl get "node/$NODE" -o jsonpath='{.status.allocatable}' | tr ',' '\n' | tr -d '{}"' | sed -n 's/^nvidia.com/   &/p'; }
show() {
	field clusterpolicy/cluster-policy '{.status.state}' ready
	kubectl get clusterpolicy,gpunodes
	echo
	drivers
	allocatable
}
workload() {
	kubectl apply -f - >/dev/null <<-POD
		apiVersion: v1
		kind: Pod
		metadata: {name: vm, namespace: default}
		spec:
		  restartPolicy: Never
		  terminationGracePeriodSeconds: 0
		  containers:
		    - name: vm
		      image: localhost/box:test
		      command: [sh, -c, "env | grep PCI_RESOURCE; ls -l /dev/vfio; exec sleep 1000000"]
		      resources: {limits: {$T4: 1}}
	POD
	kubectl wait --for=condition=Ready pod/vm --timeout=60s >/dev/null
	kubectl logs vm | sed 's/^/   /'
}
kubevirt() {
	tests/cluster/kubevirt.sh "$STATE" >/dev/null
	kubectl create namespace vms >/dev/null
	kubectl wait --for=jsonpath='{.spec.configuration.permittedHostDevices.pciHostDevices}' -n kubevirt kubevirt/kubevirt --timeout=60s >/dev/null
	echo "   gpuvirt has entered in the KubeVirt object:"
	kubectl -n kubevirt get kubevirt kubevirt -o jsonpath='{range .spec.configuration.permittedHostDevices.pciHostDevices[*]}   {.pciVendorSelector} {.resourceName}{"\n"}{end}'
}
vmi() { # NAME DEVICE...: a virtual machine instance that asks for these
	local name=$1 gpus= number=0
	shift
	for device in "$@"; do gpus+="{name: gpu$((++number)), deviceName: $device}, "; done
	kubectl -n vms apply -f - >/dev/null <<-VMI
		apiVersion: kubevirt.io/v1
		kind: VirtualMachineInstance
		metadata: {name: $name}
		spec:
		  terminationGracePeriodSeconds: 0
		  domain:
		    resources: {requests: {memory: 64Mi}}
		    devices:
		      autoattachPodInterface: false
		      gpus: [${gpus%, }]
	VMI
}
vm() {
	local pod
	vmi training $H100 $T4 $H100
	kubectl -n vms wait --for=jsonpath='{.status.phase}'=Scheduled vmi/training --timeout=120s >/dev/null
	pod=$(kubectl -n vms get pods -l vm.kubevirt.io/name=training -o name)
	echo "   its pod is $pod; what the kubelet gave it:"
	# It runs before its first line is in the log.
	until kubectl -n vms logs "$pod" | grep -q ^started; do sleep .2; done
	kubectl -n vms logs "$pod" | sed -n 's/^PCI_RESOURCE/   &/p'
	echo "   and what KubeVirt's own code makes of that for libvirt:"
	kubectl -n vms exec "$pod" -- virt-launcher-monitor gpus "$(kubectl -n vms get vmi training -o jsonpath='{.spec.domain.devices.gpus}')" 2>/dev/null | sed 's/^/   /'
}
second_vm() {
	vmi waiting $H100
	kubectl -n vms wait --for=condition=PodScheduled=false vmi/waiting --timeout=60s >/dev/null
	"$TARGET/release/gpuvirt" explain vmi vms/waiting | sed 's/^/   /' || [ "${PIPESTATUS[0]}" = 2 ]
	until kubectl -n vms get events --field-selector reason=GPUInUse -o name | grep -q .; do sleep .2; done
	echo "   and as an event:"
	kubectl -n vms get events --field-selector reason=GPUInUse -o custom-columns=:.involvedObject.name,:.reason,:.message --no-headers | sed 's/^/   /'
}
no_vms() { kubectl -n vms delete vmi --all --timeout=120s >/dev/null; }
no_workload() { kubectl delete pod vm --timeout=60s >/dev/null; }
flip() { # to_vm|to_container: sets TOOK and AGENT, its own part of it, in milliseconds
	local from pod
	from=$(milliseconds)
	"$1"
	TOOK=$(($(milliseconds) - from))
	pod=$(kubectl -n gpuvirt get pods -l app=gpuvirt-agent -o jsonpath='{.items[0].metadata.name}')
	AGENT=$(kubectl get --raw "/api/v1/namespaces/gpuvirt/pods/$pod:8080/proxy/metrics" |
		awk '/^gpuvirt_last_mode_change_duration_seconds/ {printf "%d", $2 * 1000}')
	: "${AGENT:?the agent has no metric gpuvirt_last_mode_change_duration_seconds}"
}
flip_once() { flip "$1" && echo "   of which the agent's own part, for all GPUs: $(as_seconds "$AGENT")"; }
flips() {
	local to i
	rm -f "$STATE"/flips-*
	for i in $(seq "$FLIPS"); do
		for to in to_vm to_container; do
			flip $to
			echo "   flip $i $to: $(as_seconds "$TOOK"), agent $(as_seconds "$AGENT")"
			echo "$TOOK" >>"$STATE/flips-$to"
			echo "$AGENT" >>"$STATE/flips-$to-agent"
		done
	done
	for to in to_vm to_container; do
		echo "   $to, $FLIPS flips: $(median_and_worst "$STATE/flips-$to"); agent's own part: $(median_and_worst "$STATE/flips-$to-agent")"
	done
}
median_and_worst() {
	sort -n "$1" >"$1.sorted"
	echo "median $(as_seconds "$(sed -n "$((($(wc -l <"$1") + 1) / 2))p" "$1.sorted")"), worst $(as_seconds "$(tail -n 1 "$1.sorted")")"
}
memory() {
	guest 'for p in /proc/[0-9]*; do
		command=$(cat $p/cmdline 2>/dev/null | tr "\0" " ")
		case $command in
		/usr/bin/gpuvirt\ operator*|/usr/bin/gpuvirt\ agent*) echo "   $(echo $command | cut -d" " -f2): RSS $(sed -n "s/^VmRSS:[ \t]*//p" $p/status)" ;;
		esac
	done'
}

trap ended EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
step "build: test cluster, lab kernel, release binary, images" builds
step "start: a control plane on this machine, and a node with IOMMU and GPUs in QEMU" start
step "helm install --wait" install
step "the node's driver pod loads: mode container" reached container nvidia
show
step "kubectl label node/$NODE $LABEL=vm-passthrough, until $T4 can be requested" flip_once to_vm
show
step "a pod requests one $T4" workload
step "the pod goes" no_workload
step "KubeVirt comes: its API types, virt-api and virt-controller" kubevirt
step "a VirtualMachineInstance requests an H100, a T4 and an H100" vm
step "another one requests an H100: why it does not start" second_vm
step "the VMs go" no_vms
step "kubectl label node/$NODE $LABEL=container, until the driver has the GPUs back" flip_once to_container
show
[ "${FLIPS:-0}" = 0 ] || step "$FLIPS more flips each way" flips
step "memory" memory
if [ "${DOWN-}" != 1 ]; then
	printf '\nIt stays up:\n  export KUBECONFIG=%s\n  %s kubectl get gpunodes\nmake demo-down ends it.\n' "$KUBECONFIG" "$GPUVIRT_CLUSTER_BIN/kube"
fi
