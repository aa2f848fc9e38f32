#!/bin/bash
# check.sh STATE: proves the node, one line a fact; removes what it made.
. "$(dirname "$0")/common.sh"
set -E
trap 'echo "FAILED: $BASH_COMMAND" >&2' ERR
t0=$SECONDS
ns=vm-check
gpu=0000:43:00.0
ok() { echo "ok   $1 ($((SECONDS - t0)) s)"; }
k() { kubectl -n $ns "$@"; }
not() { if "$@"; then return 1; fi; } # "! command" would never end a script under set -e

# An image imported into the running guest.
cp "$STATE/vm-out/images/probe.tar" "$VM/images/"
guest ctr -n k8s.io images import /host/images/probe.tar >>"$STATE/log/vm-check.log"
guest true
not guest false
ok "an image imported into the guest; commands in the guest with their exit status"

kubectl create namespace $ns >/dev/null
until_ok 20 k get serviceaccount default
kubectl apply -f - >/dev/null <<E
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent, namespace: $ns}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
        - name: c
          image: localhost/probe:test
          securityContext: {privileged: true}
          volumeMounts: [{name: sys, mountPath: /sys}, {name: dev, mountPath: /dev}, {name: plugins, mountPath: /var/lib/kubelet/device-plugins}]
      volumes:
        - {name: sys, hostPath: {path: /sys}}
        - {name: dev, hostPath: {path: /dev}}
        - {name: plugins, hostPath: {path: /var/lib/kubelet/device-plugins, type: Directory}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: view, namespace: $ns}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}
subjects: [{kind: ServiceAccount, name: default, namespace: $ns}]
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: $ns, labels: {app: web}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
    - name: c
      image: localhost/probe:test
      command: [sh, -c, "/kube kubectl get pods -o name; httpd -f -p 8080 -h /bin"]
      volumeMounts: [{name: kube, mountPath: /kube}]
  volumes: [{name: kube, hostPath: {path: /usr/bin/kube}}]
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: $ns}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
E
k rollout status daemonset/agent --timeout=120s >/dev/null
ok "privileged DaemonSet runs"
agent=$(k get pods -l app=agent -o name)
in_agent() { k exec "$agent" -- sh -c "$1"; }
in_agent 'for d in /sys/bus/pci/devices/*; do echo "$(basename $d) $(cat $d/vendor):$(cat $d/device) $(cat $d/class) numa $(cat $d/numa_node) group $(basename $(readlink $d/iommu_group)) $(basename $(readlink $d/driver || echo -))"; done' |
	tee "$STATE/log/vm-devices.txt" | grep 0x10de
[ "$(grep -c '0x10de:0x[0-9a-f]* 0x030[02]00' "$STATE/log/vm-devices.txt")" = 5 ]
ok "exec; the agent sees PCI devices with IOMMU groups, five of them GPUs"
[ "$(guest 'cat /sys/bus/pci/devices/0000:43:00.0/modalias')" = pci:v000010DEd00001EB8sv000010DEsd000012A2bc03sc02i00 ]
grep -q '01:00.1 0x10de:0x10f8 0x040300 .* snd_hda_intel' "$STATE/log/vm-devices.txt"
ok "a GPU's modalias with its subsystem; the audio function has the host's driver"

not in_agent '[ -d /sys/bus/pci/drivers/vfio-pci ]'
guest 'modprobe vfio-pci'
group=$(in_agent "basename \$(readlink /sys/bus/pci/devices/$gpu/iommu_group)")
not in_agent "ls /dev/vfio/$group" >/dev/null 2>&1
in_agent "echo vfio-pci >/sys/bus/pci/devices/$gpu/driver_override && echo $gpu >/sys/bus/pci/drivers_probe"
[ "$(in_agent "basename \$(readlink /sys/bus/pci/devices/$gpu/driver)")" = vfio-pci ]
in_agent "ls /dev/vfio/$group /dev/vfio/devices/*" | tr '\n' ' '
echo
ok "bound to vfio-pci by driver_override and drivers_probe: /dev/vfio/$group and the cdev are there"

held=$(in_agent "hold $group $gpu" | xargs)
grep -q '^viable=1 devfd=[0-9]' <<<"$held"
ok "a privileged pod opens group and device: $held"
[ "$(in_agent 'cdev /dev/vfio/devices/vfio*')" = 10de:1eb8 ]
ok "and through iommufd: the device's config space in VFIO says 10de:1eb8"

in_agent '[ -S /var/lib/kubelet/device-plugins/kubelet.sock ]'
guest '[ -S /var/lib/kubelet/pod-resources/kubelet.sock ]'
kubectl apply -f - >/dev/null <<E
apiVersion: v1
kind: Pod
metadata: {name: plugin, namespace: $ns}
spec:
  terminationGracePeriodSeconds: 0
  containers:
    - name: c
      image: localhost/probe:test
      command: [vfioplugin]
      securityContext: {privileged: true}
      volumeMounts: [{name: plugins, mountPath: /var/lib/kubelet/device-plugins}]
  volumes: [{name: plugins, hostPath: {path: /var/lib/kubelet/device-plugins}}]
---
apiVersion: v1
kind: Pod
metadata: {name: holder, namespace: $ns}
spec:
  terminationGracePeriodSeconds: 0
  restartPolicy: Never
  containers:
    - name: c
      image: localhost/probe:test
      command: [sh, -c, "ls /dev/vfio && exec hold $group $gpu 5"]
      resources: {limits: {lab.test/vfio: 1}}
E
until_ok 60 eval 'k logs holder | grep -q "devfd=[0-9]"'
busy=$(in_agent "hold $group $gpu 2>&1" 2>/dev/null || true)
grep -q busy <<<"$busy"
k wait --for=jsonpath='{.status.phase}'=Succeeded pod/holder --timeout=60s >/dev/null
ok "a pod without privileges gets it from a device plugin ($(k logs holder | xargs)); meanwhile the agent: $busy"

k wait --for=condition=Ready pod/client --timeout=60s >/dev/null
until_ok 60 eval 'k logs client | grep -qx pod/client'
ok "a pod on the bridge reads the API at its Service address, verified by its ca.crt; logs"
web=$(k get service web -o jsonpath='{.spec.clusterIP}')
"$STATE/bin/kube" kubectl --server="http://$web" get --raw /busybox >/dev/null
k exec client -- sh -c "/kube kubectl --server=http://$web get --raw /busybox >/dev/null"
ok "a Service in the guest, from the host and from a pod"

guest 'modprobe mtty && cd /sys/class/mdev_bus/mtty/mdev_supported_types/mtty-1 && echo 83b8f4f2-509f-382f-3c1e-e6bfe0fa1001 >create && echo "$(cat name): $(cat available_instances) left" && echo 1 >/sys/bus/mdev/devices/83b8f4f2-509f-382f-3c1e-e6bfe0fa1001/remove && rmmod mtty'
ok "mdev (mtty) made and removed"
[ "$(guest 'cd /sys/bus/pci/devices/0000:02:00.0 && echo 0 >sriov_drivers_autoprobe && echo 4 >sriov_numvfs && ls -d virtfn*/iommu_group/devices/* | wc -l && echo 0 >sriov_numvfs')" = 4 ]
ok "SR-IOV: 4 VFs, each alone in its IOMMU group, made and taken away"
[ "$(guest 'modprobe nvidia; cd /sys/bus/pci/devices/0000:01:00.0; basename $(readlink driver); gone=/sys/module/pciid/parameters/gone
	echo 01:00.0 >$gone; hexdump -n 4 -e "\"%08x\n\"" config; echo >$gone; hexdump -n 4 -e "\"%08x\n\"" config' | xargs)" = 'nvidia ffffffff 1eb110de' ]
ok "a driver named nvidia takes the GPUs by their ids; a GPU falls off the bus"
[ "$(guest 'readlink /sys/bus/pci/devices/0000:01:00.1/driver | xargs basename')" = snd_hda_intel ]
minor=$(guest 'sed -n "s/^Device Minor: *\t* *//p" /proc/driver/nvidia/gpus/0000:44:00.0/information')
guest "sleep 1000000 </dev/nvidia$minor >/dev/null 2>&1 & echo \$! >/tmp/user"
not guest 'rmmod nvidia' >/dev/null 2>&1
guest '(echo 0000:44:00.0 >/sys/bus/pci/drivers/nvidia/unbind; touch /tmp/unbound) >/dev/null 2>&1 & echo $! >/tmp/writer'
until_ok 20 guest 'grep -q "^State:.D" /proc/$(cat /tmp/writer)/status'
guest 'kill $(cat /tmp/user)'
until_ok 20 guest '[ -e /tmp/unbound ] && [ ! -e /sys/bus/pci/devices/0000:44:00.0/driver ]'
guest 'rmmod nvidia && [ ! -e /dev/nvidiactl ] && [ ! -e /proc/driver/nvidia ]'
ok "an open /dev/nvidia$minor keeps the module loaded, and the unbind of that GPU waits until it is closed"

plugged() { guest '[ "$(cat /sys/bus/pci/devices/0000:84:00.0/device)" = 0x2330 ]'; }
plugged
"$LAB/monitor.py" "$STATE" device_del gpu3
until_ok 20 not plugged
until_ok 20 eval '[ -z "$("$LAB/monitor.py" "$STATE" device_add edu,id=gpu3,bus=d3)" ]'
until_ok 20 plugged
ok "a GPU pulled out of its slot and put back"

in_agent "echo $gpu >/sys/bus/pci/drivers/vfio-pci/unbind; echo >/sys/bus/pci/devices/$gpu/driver_override"
kubectl delete namespace $ns --timeout=60s >/dev/null
ok "namespace deleted"
