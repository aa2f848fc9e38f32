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

{{/* Image of the operator and the agent: repository/image:version, repository/image@sha256:…, or all of it in `image`. */}}
{{- define "gpuvirt.image" -}}
{{- $o := .Values.operator }}
{{- $name := $o.image }}
{{- with $o.repository }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end }}
{{- if $o.version }}
{{- printf "%s%s%s" $name (ternary "@" ":" (hasPrefix "sha256:" $o.version)) $o.version }}
{{- else if regexMatch "[:@]" (base $o.image) }}
{{- $name }}
{{- else }}
{{- printf "%s:%s" $name .Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* Pull secrets are held by the ServiceAccounts, so that pods made by the operator have them too. */}}
{{- define "gpuvirt.pullSecrets" -}}
{{- with .Values.operator.imagePullSecrets }}
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
  {{- if hasKey . "gpuPodDeletion" }}
    {{- $_ := set . "podDeletion" .gpuPodDeletion }}
    {{- $_ := unset . "gpuPodDeletion" }}
  {{- end }}
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
{{- /* The schema requires these sections. Never empty: an apply that empties a section makes it null, which the schema refuses. */}}
{{- if not $spec.operator }}{{ $_ := set $spec "operator" (dict "runtimeClass" "nvidia") }}{{ end }}
{{- if not $spec.daemonsets }}{{ $_ := set $spec "daemonsets" (dict "updateStrategy" "RollingUpdate") }}{{ end }}
{{- range list "dcgm" "dcgmExporter" "devicePlugin" "driver" "gfd" "nodeStatusExporter" "toolkit" }}
  {{- if not (index $spec .) }}{{ $_ := set $spec . (dict "enabled" false) }}{{ end }}
{{- end }}
{{- toYaml $spec }}
{{- end }}
