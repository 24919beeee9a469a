{{- define "metagpu.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "metagpu.fullname" -}}
{{- $name := include "metagpu.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "metagpu.account" -}}
{{ default (include "metagpu.fullname" .) .Values.serviceAccount.name }}
{{- end }}

{{/* The user of the account's tokens, as a policy sees it. */}}
{{- define "metagpu.user" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ include "metagpu.account" . }}
{{- end }}

{{- define "metagpu.selector" -}}
app.kubernetes.io/name: {{ include "metagpu.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "metagpu.labels" -}}
{{ include "metagpu.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "metagpu.image" -}}
{{- $repository := required "image.repository is not set: name the image in a registry of yours, as --set image.repository=registry.example.com/metagpu; docs/install.md says how it gets there" .Values.image.repository -}}
{{- with .Values.image.digest -}}
{{ $repository }}@{{ . }}
{{- else -}}
{{ $repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end }}

{{/* The features in use, separated by commas; empty for none. */}}
{{- define "metagpu.features" -}}
{{- $on := list -}}
{{- range $name, $used := .Values.features }}{{ if $used }}{{ $on = append $on $name }}{{ end }}{{ end -}}
{{ join "," $on }}
{{- end }}

{{/* Not empty where the status, or the page, is served to viewers: an API server reviews their tokens. */}}
{{- define "metagpu.viewers" -}}
{{- if or (include "metagpu.statusApi" .) (include "metagpu.web" .) }}yes{{ end }}
{{- end }}
{{- define "metagpu.statusApi" -}}
{{- if and .Values.statusApi.port (include "metagpu.features" .) }}yes{{ end }}
{{- end }}
{{- define "metagpu.web" -}}
{{- if and .Values.web.port (include "metagpu.features" .) }}yes{{ end }}
{{- end }}

{{/* Not empty where one of the named features is in use. */}}
{{- define "metagpu.uses" -}}
{{- $root := index . 0 -}}
{{- range rest . }}{{ if index $root.Values.features . }}yes{{ end }}{{ end -}}
{{- end }}

{{/* The ConfigMaps with the configuration, divided by commas; empty for none. */}}
{{- define "metagpu.configMaps" -}}
{{- if .Values.config.name -}}
{{ kindIs "slice" .Values.config.name | ternary .Values.config.name (list .Values.config.name) | join "," }}
{{- else if or .Values.config.map .Values.config.inline -}}
{{ include "metagpu.fullname" . }}
{{- end -}}
{{- end }}

{{/* The only ConfigMap: a watch follows it. Several are files that belong together. */}}
{{- define "metagpu.configMap" -}}
{{- $names := include "metagpu.configMaps" . -}}
{{- if not (contains "," $names) }}{{ $names }}{{ end -}}
{{- end }}

{{/* Not empty where a new daemon takes the node over from the old one. */}}
{{- define "metagpu.surges" -}}
{{- $rolling := default dict .Values.updateStrategy.rollingUpdate -}}
{{- if and (eq .Values.updateStrategy.type "RollingUpdate") (not (has (toString $rolling.maxSurge) (list "<nil>" "0" "0%"))) }}yes{{ end -}}
{{- end }}

{{/* Not empty where the tokens of pods name their node. */}}
{{- define "metagpu.limits" -}}
{{- if and .Values.admissionPolicies (semverCompare ">=1.32.0-0" .Capabilities.KubeVersion.Version) }}yes{{ end -}}
{{- end }}

{{- define "metagpu.cdi" -}}
{{- if or .Values.cdi.enabled .Values.dra.enabled (contains "cdi" .Values.deviceListStrategy) }}yes{{ end -}}
{{- end }}

{{/* The root of /dev that needs a mount of its own: no other mount of the host's has it. */}}
{{- define "metagpu.devRoot" -}}
{{- $root := trimSuffix "/" .Values.nvidiaDevRoot -}}
{{- if not (or (eq $root .Values.nvidiaDriverRoot) (hasPrefix "/run/nvidia/" (printf "%s/" $root))) }}{{ $root }}{{ end -}}
{{- end }}

{{/* Combinations that no schema can refuse. */}}
{{- define "metagpu.check" -}}
{{- if and .Values.config.name (or .Values.config.map .Values.config.inline) }}
{{- fail "config.name names a ConfigMap of yours, and config.map or config.inline makes one: set one of them" }}
{{- end }}
{{- if and .Values.config.inline (hasKey .Values.config.map "default") }}
{{- fail "config.inline is the profile `default`, which config.map has too: set one of them" }}
{{- end }}
{{- if and .Values.config.default .Values.config.map (ne .Values.config.default "default") (not (hasKey .Values.config.map .Values.config.default)) }}
{{- fail (printf "config.default: config.map has no profile %q" .Values.config.default) }}
{{- end }}
{{- if and .Values.metrics.port (eq (int .Values.metrics.port) (int .Values.statusApi.port)) }}
{{- fail "statusApi.port: the metrics have this port; give it another one, or 0 for none" }}
{{- end }}
{{- if and .Values.web.port (or (eq (int .Values.web.port) (int .Values.metrics.port)) (eq (int .Values.web.port) (int .Values.statusApi.port))) }}
{{- fail "web.port: the metrics or the status have this port; give it another one, or 0 for none" }}
{{- end }}
{{- if and .Values.web.port (not (include "metagpu.features" .)) }}
{{- fail "web.port: the API server reviews the tokens of the page's users; set one of features, as features.pods=true" }}
{{- end }}
{{- with .Values.webhook.certificate }}
{{- if and $.Values.webhook.enabled (eq .from "secret") (not (and .secret .caBundle)) }}
{{- fail "webhook.certificate: with from=secret, set secret to the name of yours and caBundle to its authority" }}
{{- end }}
{{- end }}
{{- if and (index .Values.features "free-labels") (not .Values.features.labels) }}
{{- fail "features: free-labels are some of the labels: set labels too" }}
{{- end }}
{{- if and .Values.features.janitor (index .Values.features "janitor-dry-run") }}
{{- fail "features: janitor deletes pods and janitor-dry-run deletes none: set one of them" }}
{{- end }}
{{- if and (include "metagpu.uses" (list . "janitor" "janitor-dry-run")) (not (and (include "metagpu.limits" .) .Values.features.pods (index .Values.features "pod-events"))) }}
{{- fail "features: the janitor needs pods, pod-events and admissionPolicies, on Kubernetes 1.32 or newer" }}
{{- end }}
{{- if and .Values.dra.enabled (not (include "metagpu.features" .)) }}
{{- fail "dra.enabled: ResourceSlices and ResourceClaims are at the API server; set one of features, as features.pods=true" }}
{{- end }}
{{- if and .Values.dra.extendedResources (not .Values.dra.enabled) }}
{{- fail "dra.extendedResources: their DeviceClasses select devices of DRA; set dra.enabled=true" }}
{{- end }}
{{- if and .Values.drainOnDriverUpgrade (not (include "metagpu.features" .)) }}
{{- fail "drainOnDriverUpgrade: the operator's labels are read from the API server; set one of features, as features.events=true" }}
{{- end }}
{{- if and (include "metagpu.surges" .) (not .Values.metrics.port) }}
{{- fail "metrics.port: a rollout with maxSurge waits for the probe /readyz; set a port, or updateStrategy.rollingUpdate.maxSurge=0 and maxUnavailable=1" }}
{{- end }}
{{- if eq .Values.updateStrategy.type "RollingUpdate" }}
{{- $unavailable := toString (default dict .Values.updateStrategy.rollingUpdate).maxUnavailable }}
{{- if eq (empty (include "metagpu.surges" .)) (has $unavailable (list "0" "0%")) }}
{{- fail "updateStrategy.rollingUpdate: one of maxSurge and maxUnavailable is 0, and the other is not: set maxSurge=1 and maxUnavailable=0, or maxSurge=0 and maxUnavailable=1" }}
{{- end }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.port) }}
{{- fail "metrics.serviceMonitor: there are no metrics without a port: set metrics.port, or metrics.serviceMonitor.enabled=false" }}
{{- end }}
{{- if and .Values.metrics.podMonitor.enabled (not .Values.metrics.port) }}
{{- fail "metrics.podMonitor: there are no metrics without a port: set metrics.port, or metrics.podMonitor.enabled=false" }}
{{- end }}
{{- if and (or .Values.metrics.podMonitor.enabled .Values.metrics.serviceMonitor.enabled) .Values.networkPolicy.enabled (not .Values.networkPolicy.from) }}
{{- fail "networkPolicy.from: with a monitor, name Prometheus, which the policy keeps out otherwise: --set 'networkPolicy.from[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=NAMESPACE', or set networkPolicy.enabled=false" }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled .Values.metrics.podMonitor.enabled }}
{{- fail "metrics: a PodMonitor and a ServiceMonitor would count everything twice: set one of them" }}
{{- end }}
{{- end }}

{{/* Paths that a scrape reads, between blanks. */}}
{{- define "metagpu.metricsPaths" -}}
/metrics{{ if .Values.metrics.dcgm.enabled }} /dcgm{{ end }}
{{- end }}
