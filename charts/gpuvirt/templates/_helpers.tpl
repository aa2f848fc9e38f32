{{/* Labels of every object. Call with (dict "root" $ "component" "operator"). */}}
{{- define "gpuvirt.labels" -}}
{{ include "gpuvirt.selectorLabels" . }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: gpuvirt
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "gpuvirt.selectorLabels" -}}
app.kubernetes.io/name: gpuvirt
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* An image reference, or the part of one before the version, at global.imageRegistry. Call with (dict "root" $ "image" "…"). */}}
{{- define "gpuvirt.atRegistry" -}}
{{- $registry := (.root.Values.global | default dict).imageRegistry }}
{{- if and $registry .image }}
{{- $parts := splitList "/" .image }}
{{- $host := first $parts }}
{{- /* What has a dot or a port is a host's name, as container engines read it; a bare name has none before it. */}}
{{- $named := and (or (contains "." $host) (contains ":" $host) (eq $host "localhost")) (or (gt (len $parts) 1) (hasKey . "path")) }}
{{- join "/" (prepend (ternary (rest $parts) $parts $named) (trimSuffix "/" $registry)) }}
{{- else }}
{{- .image }}
{{- end }}
{{- end }}

{{/*
Image of the operator and the agent: repository/image:version, repository/image@sha256:…, or all of it in `image`.
A values file of the peer may name the peer's own operator: of that only a registry that is not NVIDIA's counts.
*/}}
{{- define "gpuvirt.image" -}}
{{- $o := .Values.operator }}
{{- if include "gpuvirt.peersOperator" . }}
{{- $o = dict "repository" (ternary "localhost" $o.repository (hasPrefix "nvcr.io/" (toString $o.repository))) "image" "gpuvirt" "version" "" }}
{{- end }}
{{- $name := $o.image }}
{{- with $o.repository }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end }}
{{- if $o.version }}
{{- $name = printf "%s%s%s" $name (ternary "@" ":" (hasPrefix "sha256:" $o.version)) $o.version }}
{{- else if not (regexMatch "[:@]" (base $o.image)) }}
{{- $name = printf "%s:%s" $name .Chart.AppVersion }}
{{- end }}
{{- include "gpuvirt.atRegistry" (dict "root" . "image" $name) }}
{{- end }}

{{- define "gpuvirt.peersOperator" -}}
{{- if eq (base .Values.operator.image) "gpu-operator" }}true{{ end }}
{{- end }}

{{/* Changes the given map: images in it, at any depth, are those of global.imageRegistry. Call with (dict "root" $ "in" $map). */}}
{{- define "gpuvirt.imagesAtRegistry" -}}
{{- $root := .root }}
{{- range $key, $value := .in }}
  {{- if kindIs "map" $value }}
    {{- if $value.repository }}
      {{- $_ := set $value "repository" (include "gpuvirt.atRegistry" (dict "root" $root "image" $value.repository "path" true)) }}
    {{- else if and $value.image (contains "/" (toString $value.image)) }}
      {{- $_ := set $value "image" (include "gpuvirt.atRegistry" (dict "root" $root "image" $value.image)) }}
    {{- end }}
    {{- include "gpuvirt.imagesAtRegistry" (dict "root" $root "in" $value) }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Pull secrets are held by the ServiceAccounts, so that pods made by the operator have them too. */}}
{{- define "gpuvirt.pullSecrets" -}}
{{- $names := list }}
{{- range concat ((.Values.global | default dict).imagePullSecrets | default list) (.Values.operator.imagePullSecrets | default list) }}
{{- if kindIs "map" . }}{{ $names = append $names .name }}{{ else }}{{ $names = append $names . }}{{ end }}
{{- end }}
{{- with $names | uniq }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "gpuvirt.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "gpuvirt.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Settings of Node Feature Discovery: those of `nfd`, and over them what the peer's chart calls node-feature-discovery. */}}
{{- define "gpuvirt.nfd" -}}
{{- $nfd := deepCopy .Values.nfd }}
{{- $peer := index .Values "node-feature-discovery" | default dict }}
{{- $over := deepCopy (pick $peer "image" "priorityClassName") }}
{{- range $who := list "master" "worker" "gc" }}
{{- with index $peer $who }}{{ $_ := set $over $who (deepCopy (pick . "config" "tolerations" "affinity" "resources")) }}{{ end }}
{{- end }}
{{- $over | mergeOverwrite $nfd | toJson }}
{{- end }}

{{- define "gpuvirt.placement" -}}
{{- with .Values.operator.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
Changes the given map: nulls, empty maps, empty lists and empty parts of an image reference go, at any depth.
The ClusterPolicy schema has patterns for the latter; other empty strings may mean something (migManager.config.default).
*/}}
{{- define "gpuvirt.compact" -}}
{{- $map := . }}
{{- range $key, $value := $map }}
  {{- if kindIs "map" $value }}
    {{- include "gpuvirt.compact" $value }}
  {{- else if kindIs "slice" $value }}
    {{- $kept := list }}
    {{- range $value }}
      {{- if kindIs "map" . }}{{ include "gpuvirt.compact" . }}{{ end }}
      {{- if not (kindIs "invalid" .) }}{{ $kept = append $kept . }}{{ end }}
    {{- end }}
    {{- $value = $kept }}
    {{- $_ := set $map $key $kept }}
  {{- end }}
  {{- if or (kindIs "invalid" $value) (and (kindIs "map" $value) (empty $value)) (and (kindIs "slice" $value) (empty $value)) }}
    {{- $_ := unset $map $key }}
  {{- else if and (has $key (list "repository" "image" "version" "imagePullPolicy")) (eq (toString $value) "") }}
    {{- $_ := unset $map $key }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The ClusterPolicy's spec: the values, less what is the chart's own. */}}
{{- define "gpuvirt.clusterPolicySpec" -}}
{{- $spec := dict "operator" (deepCopy (pick .Values.operator "defaultRuntime" "runtimeClass" "initContainer" "use_ocp_driver_toolkit")) }}
{{- range list "sandboxWorkloads" "daemonsets" "driver" "toolkit" "devicePlugin" "dcgm" "dcgmExporter" "gfd" "migManager" "mig"
      "nodeStatusExporter" "vgpuManager" "vgpuDeviceManager" "vfioManager" "sandboxDevicePlugin" "kataSandboxDevicePlugin"
      "kataManager" "ccManager" "gds" "gdrcopy" "validator" "cdi" "hostPaths" "psa" "psp" }}
  {{- $_ := set $spec . (deepCopy (index $.Values . | default dict)) }}
{{- end }}
{{- $driver := $spec.driver }}
{{- with $driver.nvidiaDriverCRD }}
  {{- $_ := set $driver "useNvidiaDriverCRD" (.enabled | default false) }}
{{- end }}
{{- $_ := unset $driver "nvidiaDriverCRD" }}
{{- with $driver.upgradePolicy }}
  {{- if .gpuPodDeletion }}
    {{- $_ := set . "podDeletion" (mergeOverwrite .gpuPodDeletion (.podDeletion | default dict)) }}
  {{- end }}
  {{- $_ := unset . "gpuPodDeletion" }}
{{- end }}
{{- range list $spec.devicePlugin $spec.migManager $spec.dcgmExporter }}
  {{- with .config }}
    {{- $_ := unset . "create" }}
    {{- $_ := unset . "data" }}
  {{- end }}
{{- end }}
{{- with $spec.daemonsets.rollingUpdate }}
  {{- with .maxUnavailable }}{{ $_ := set $spec.daemonsets.rollingUpdate "maxUnavailable" (toString .) }}{{ end }}
{{- end }}
{{- include "gpuvirt.compact" $spec }}
{{- include "gpuvirt.imagesAtRegistry" (dict "root" $ "in" $spec) }}
{{- /* The schema requires these sections. Never empty: an apply that empties a section makes it null, which the schema refuses. */}}
{{- if not $spec.operator }}{{ $_ := set $spec "operator" (dict "runtimeClass" "nvidia") }}{{ end }}
{{- if not $spec.daemonsets }}{{ $_ := set $spec "daemonsets" (dict "updateStrategy" "RollingUpdate") }}{{ end }}
{{- range list "dcgm" "dcgmExporter" "devicePlugin" "driver" "gfd" "nodeStatusExporter" "toolkit" }}
  {{- if not (index $spec .) }}{{ $_ := set $spec . (dict "enabled" false) }}{{ end }}
{{- end }}
{{- toYaml $spec }}
{{- end }}

{{/* How many letters two words differ by: the least number of letters to put in, take out or replace. Call with (list "a" "b"). */}}
{{- define "gpuvirt.distance" -}}
{{- $a := splitList "" (lower (index . 0)) }}
{{- $b := splitList "" (lower (index . 1)) }}
{{- $row := untilStep 0 (int (add1 (len $b))) 1 }}
{{- range $i, $x := $a }}
  {{- $next := list (add1 $i) }}
  {{- range $j, $y := $b }}
    {{- $next = append $next (min (add1 (index $row (add1 $j | int))) (add1 (index $next $j)) (add (index $row $j) (ternary 0 1 (eq $x $y)))) }}
  {{- end }}
  {{- $row = $next }}
{{- end }}
{{- last $row }}
{{- end }}

{{/* A line for each key that the chart does not know, with the nearest one that it does. Call with (dict "values" … "known" … "path" ""). */}}
{{- define "gpuvirt.unknownKeys" -}}
{{- $in := . }}
{{- range $key, $value := .values }}
{{- if kindIs "invalid" $value }}
{{- else if not (hasKey $in.known $key) }}
  {{- $best := "" }}
  {{- $least := max 2 (div (len $key) 3) }}
  {{- range $candidate, $_ := $in.known }}
    {{- $distance := include "gpuvirt.distance" (list $key $candidate) | atoi }}
    {{- if le $distance (int $least) }}{{ $best = $candidate }}{{ $least = sub $distance 1 }}{{ end }}
  {{- end }}
  {{- $hint := printf "known there: %s" (keys $in.known | sortAlpha | join ", ") }}
  {{- with $best }}{{ $hint = printf "did you mean %s%s?" $in.path . }}{{ end }}
  {{- printf "\n  %s%s: %s" $in.path $key $hint }}
{{- else if and (kindIs "map" $value) (kindIs "map" (index $in.known $key)) }}
  {{- include "gpuvirt.unknownKeys" (dict "values" $value "known" (index $in.known $key) "path" (printf "%s%s." $in.path $key)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A pod that runs this program once, under the ServiceAccount of that name. Call with (dict "root" $ "component" "…" "args" (list …)). */}}
{{- define "gpuvirt.once" -}}
restartPolicy: Never
serviceAccountName: gpuvirt-{{ .component }}
{{- with .root.Values.operator.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{ include "gpuvirt.placement" .root | trim }}
securityContext: {{- include "gpuvirt.podSecurity" .root | nindent 2 }}
containers:
  - name: {{ .component }}
    image: {{ include "gpuvirt.image" .root | quote }}
    imagePullPolicy: {{ .root.Values.operator.imagePullPolicy }}
    args: {{- toYaml .args | nindent 6 }}
    env:
      - name: POD_NAMESPACE
        valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
      - name: POD_NAME
        valueFrom: {fieldRef: {fieldPath: metadata.name}}
      - name: LOG_LEVEL
        value: {{ .root.Values.operator.logging.level | quote }}
      - name: LOG_FORMAT
        value: {{ .root.Values.operator.logging.format }}
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 128Mi}
    terminationMessagePolicy: FallbackToLogsOnError
    securityContext: {{- include "gpuvirt.containerSecurity" .root | nindent 6 }}
{{- end }}

{{/* An account with a ClusterRole and its binding. Call with (dict "root" $ "component" "…" "annotations" (dict …) "rules" (list …)). */}}
{{- define "gpuvirt.account" -}}
{{- $labels := include "gpuvirt.labels" . }}
{{- $name := printf "gpuvirt-%s" .component }}
{{- $annotations := .annotations | default dict }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- include "gpuvirt.pullSecrets" .root }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
rules: {{- toYaml .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: {{ $name }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}
