{{- define "millrace.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "millrace.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "millrace.selector" . }}
{{- end }}

{{- define "millrace.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "millrace.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "millrace.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "millrace.name" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{/* The tables that all processes share, as TOML. */}}
{{- define "millrace.config" -}}
[datafs]
meta_url = {{ required "database.url is missing: name the PostgreSQL server of the metadata" .Values.database.url | quote }}
meta_schema = {{ .Values.database.schema | default (.Release.Namespace | replace "-" "_") | quote }}
store_url = {{ required "store.url is missing: name the bucket of the file data" .Values.store.url | quote }}
{{- with .Values.store.options }}

[datafs.store_options]
{{- range $key, $value := . }}
{{ $key }} = {{ $value | toString | quote }}
{{- end }}
{{- end }}
{{- if .Values.kafka.bootstrapServers }}

[streams]
bootstrap_servers = {{ .Values.kafka.bootstrapServers | quote }}
{{- with .Values.kafka.properties }}

[streams.properties]
{{- range $key, $value := . }}
{{ $key | quote }} = {{ if kindIs "map" $value }}{{ "{" }} env = {{ required (printf "kafka.properties.%s needs text or {env: NAME}" $key) $value.env | quote }} {{ "}" }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Secrets, and the address of the pod for the others. */}}
{{- define "millrace.env" -}}
- {name: MILLRACE_HOME, value: /var/lib/millrace/home}
- {name: MILLRACE_CONFIG, value: /etc/millrace/millrace.toml}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- with .Values.database.passwordSecret }}
{{- if .name }}
- name: PGPASSWORD
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- with .Values.store.credentialsSecret }}
{{- if .name }}
- name: AWS_ACCESS_KEY_ID
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .accessKeyId }}}}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .secretAccessKey }}}}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The restricted profile of Pod Security. */}}
{{- define "millrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "millrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "millrace.podCommon" -}}
serviceAccountName: {{ include "millrace.serviceAccount" . }}
automountServiceAccountToken: false
# Variables of services would be taken for settings.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  {{- include "millrace.podSecurity" . | nindent 2 }}
{{- end }}

{{/* Placement: of a tier of GPUs, and over machines. Takes root, part (nodeSelector, tolerations, gpuTier) and selector. */}}
{{- define "millrace.placement" -}}
{{- $tier := dict }}
{{- if .part.gpuTier }}
{{- $tier = get .root.Values.gpuTiers .part.gpuTier | required (printf "gpuTier %q is not in gpuTiers" .part.gpuTier) }}
{{- end }}
{{- with merge (dict) (.part.nodeSelector | default dict) ($tier.nodeSelector | default dict) }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with concat (.part.tolerations | default list) ($tier.tolerations | default list) }}
tolerations: {{ toJson . }}
{{- end }}
{{- if or $tier.products $tier.memoryMiB $tier.computeMajor }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            {{- with $tier.products }}
            {{- $names := . }}
            {{- if $tier.shared }}{{ range . }}{{ $names = append $names (printf "%s-SHARED" .) }}{{ end }}{{ end }}
            - {key: nvidia.com/gpu.product, operator: In, values: {{ toJson $names }}}
            {{- end }}
            {{- with $tier.memoryMiB }}
            - {key: nvidia.com/gpu.memory, operator: Gt, values: [{{ int64 . | toString | quote }}]}
            {{- end }}
            {{- with $tier.computeMajor }}
            - {key: nvidia.com/gpu.compute.major, operator: Gt, values: [{{ int64 . | toString | quote }}]}
            {{- end }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {{ toJson .selector }}}
{{- end }}

{{/* Resources with the cards of a tier. Takes root and part. The program computes with CUDA only. */}}
{{- define "millrace.resources" -}}
{{- $resources := deepCopy (.resources | default .part.resources) }}
{{- if and .part.gpuTier (not .resources) }}
{{- $tier := get .root.Values.gpuTiers .part.gpuTier }}
{{- $resource := $tier.resource | default "nvidia.com/gpu" }}
{{- if not (hasPrefix "nvidia.com/" $resource) }}
{{- fail (printf "gpuTiers.%s.resource is %q, but millrace computes on NVIDIA's cards only, and these would stay idle: set gpuTier to a tier of nvidia.com/…, or to none" .part.gpuTier $resource) }}
{{- end }}
{{- $cards := dict $resource (.part.gpus | default 1 | int64 | toString) }}
{{- $_ := set $resources "limits" (merge $cards ($resources.limits | default dict)) }}
{{- end }}
{{- toJson $resources }}
{{- end }}

{{/* The image of a sidecar. */}}
{{- define "millrace.sidecar" -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag }}{{ end }}
{{- end }}

{{/* What the pods of a CSI driver's node have in common. */}}
{{- define "millrace.csiNode" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
priorityClassName: {{ .Values.csi.node.priorityClassName }}
terminationGracePeriodSeconds: 60
{{- with .Values.csi.node.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.csi.node.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}
