{{- /* What single values cannot say. Every problem names the values it is about, and all are reported at once. */ -}}
{{- define "carousel.problems" -}}
{{- $v := .Values -}}
{{- $s := $v.settings -}}
{{- $a := $v.autoscaling -}}
{{- $isvc := eq $v.mode "inferenceservice" -}}
{{- if and (ne $a.type "none") (not (kindIs "invalid" $v.replicas)) }}
replicas ({{ $v.replicas }}) contradicts autoscaling.type ({{ $a.type }}), which sets the number of pods: leave replicas out
{{- end }}
{{- if gt (int $a.minReplicas) (int $a.maxReplicas) }}
autoscaling.minReplicas ({{ $a.minReplicas }}) is above autoscaling.maxReplicas ({{ $a.maxReplicas }})
{{- end }}
{{- if and (eq (int $a.minReplicas) 0) (eq $a.type "hpa") }}
autoscaling.minReplicas 0: an HPA cannot go to zero; use autoscaling.type keda with autoscaling.keda.trigger external-push
{{- end }}
{{- if and (eq (int $a.minReplicas) 0) (eq $a.type "keda") (not (include "carousel.wantsScaler" .)) }}
autoscaling.minReplicas 0: with autoscaling.keda.trigger {{ $a.keda.trigger }} the metrics come from the pods, so nothing could wake the last one; use external or external-push
{{- end }}
{{- if and (eq $a.type "keda") (lt (int $a.keda.cooldownPeriod) (int $a.keda.pollingInterval)) }}
autoscaling.keda.cooldownPeriod ({{ $a.keda.cooldownPeriod }}) is below autoscaling.keda.pollingInterval ({{ $a.keda.pollingInterval }}): the first idle poll would take the last pod
{{- end }}
{{- if and (eq $a.type "keda") (eq $a.keda.trigger "prometheus") (not $a.keda.prometheus.serverAddress) }}
autoscaling.keda.prometheus.serverAddress is empty: trigger prometheus must know where it is
{{- end }}
{{- if and (eq $a.type "keda") (eq $a.keda.trigger "metrics-api") $v.tls.clientCertificates }}
autoscaling.keda.trigger metrics-api contradicts tls.clientCertificates: KEDA has none to show; use prometheus
{{- end }}
{{- if and (include "carousel.wantsScaler" .) $v.tls.clientCertificates }}
autoscaling.keda.trigger {{ $a.keda.trigger }} contradicts tls.clientCertificates: the scaler has no certificate to show; use prometheus
{{- end }}
{{- if and $v.scaler.activator.enabled (not (include "carousel.wantsScaler" .)) }}
scaler.activator.enabled without a scaler: it needs autoscaling.type keda and autoscaling.keda.trigger external or external-push
{{- end }}
{{- if and $v.scaler.activator.enabled (has (int $v.scaler.activator.port) (list 9095 9096)) }}
scaler.activator.port {{ $v.scaler.activator.port }} is the scaler's own: 9095 serves KEDA, 9096 health and metrics
{{- end }}
{{- if and $v.loadTest.enabled $v.tls.clientCertificates }}
loadTest.enabled contradicts tls.clientCertificates: the load test has no certificate to show
{{- end }}
{{- if and $v.loadTest.enabled (include "carousel.apiKeysSecret" .) (not $v.loadTest.apiKeySecret.name) }}
loadTest.enabled without loadTest.apiKeySecret.name: the server asks for a key
{{- end }}
{{- if and $v.gpu.enabled (eq (toString $s.device) "cpu") }}
settings.device cpu contradicts gpu.enabled
{{- end }}
{{- if and $v.gpu.enabled (gt (include "carousel.ranks" . | int) 1) (contains "/mig-" $v.gpu.resource) }}
settings.tensor_parallel_size {{ $s.tensor_parallel_size }} with gpu.resource {{ $v.gpu.resource }}: a process sees one MIG slice only; use whole GPUs
{{- end }}
{{- if and (not $v.gpu.enabled) (hasPrefix "cuda" (toString $s.device)) }}
settings.device {{ $s.device }} without gpu.enabled: the pod would get no GPU
{{- end }}
{{- if and (not $v.gpu.enabled) $v.runtimeClassName (contains "nvidia" $v.runtimeClassName) }}
runtimeClassName {{ $v.runtimeClassName }} without gpu.enabled: the pod would get no GPU
{{- end }}
{{- range list "tls_certificate" "tls_key" "tls_client_ca" }}
{{- if and (get $s .) $v.tls.secretName }}
settings.{{ . }} contradicts tls.secretName: say it in one place
{{- end }}
{{- end }}
{{- if or $s.tls_certificate $s.tls_key $s.tls_client_ca }}{{ if not $v.tls.secretName }}
settings.tls_certificate, tls_key and tls_client_ca: use tls.secretName, from which probes and scrapers learn of TLS too
{{- end }}{{ end }}
{{- if and $v.tls.clientCertificates (not $v.tls.secretName) }}
tls.clientCertificates without tls.secretName: TLS is off
{{- end }}
{{- if and $v.tls.clientCertificates (not $v.tls.clientSecretName) }}
tls.clientSecretName is empty: with tls.clientCertificates the probes need a certificate to show
{{- end }}
{{- if and $s.api_keys (include "carousel.apiKeysSecret" .) }}
settings.api_keys contradicts apiKeys: say it in one place
{{- end }}
{{- if and $v.apiKeys.existingSecret $v.apiKeys.keys }}
apiKeys.existingSecret contradicts apiKeys.keys: one of the two
{{- end }}
{{- if and $s.tenant_policy (include "carousel.policyConfigMap" .) }}
settings.tenant_policy contradicts tenants: say it in one place
{{- end }}
{{- if and $v.tenants.existingConfigMap $v.tenants.policy }}
tenants.existingConfigMap contradicts tenants.policy: one of the two
{{- end }}
{{- if and $s.usage_log (ne $v.usageLog.kind "none") }}
settings.usage_log contradicts usageLog: say it in one place
{{- end }}
{{- if ne (eq $v.usageLog.kind "existingClaim") (ne $v.usageLog.existingClaim "") }}
usageLog.existingClaim ({{ $v.usageLog.existingClaim | quote }}) and usageLog.kind ({{ $v.usageLog.kind }}): a claim of yours needs both, its name and kind existingClaim
{{- end }}
{{- if and $v.huggingFace.existingSecret $v.huggingFace.token }}
huggingFace.existingSecret contradicts huggingFace.token: one of the two
{{- end }}
{{- if and $v.s3.existingSecret (or $v.s3.accessKeyId $v.s3.secretAccessKey) }}
s3.existingSecret contradicts s3.accessKeyId and s3.secretAccessKey: one of the two
{{- end }}
{{- if ne (empty $v.s3.accessKeyId) (empty $v.s3.secretAccessKey) }}
s3.accessKeyId and s3.secretAccessKey: one without the other
{{- end }}
{{- if ne (eq $v.cache.kind "existingClaim") (ne $v.cache.existingClaim "") }}
cache.existingClaim ({{ $v.cache.existingClaim | quote }}) and cache.kind ({{ $v.cache.kind }}): a claim of yours needs both, its name and kind existingClaim
{{- end }}
{{- if and $v.cache.readOnly (eq $v.cache.kind "emptyDir") }}
cache.readOnly contradicts cache.kind emptyDir: nothing could ever get into it
{{- end }}
{{- $most := ternary (include "carousel.replicas" . | int) $a.maxReplicas (eq $a.type "none") }}
{{- if and (eq $v.cache.kind "claim") (eq $v.cache.claim.accessMode "ReadWriteOncePod") (gt (add (int $most) (int $v.updateStrategy.maxSurge)) 1) }}
cache.claim.accessMode ReadWriteOncePod lets one pod in, and {{ $most }} may run (updateStrategy.maxSurge {{ $v.updateStrategy.maxSurge }}): use ReadWriteMany, or one pod with maxSurge 0
{{- end }}
{{- if and (eq (trimSuffix "%" (toString $v.updateStrategy.maxSurge)) "0") (eq (trimSuffix "%" (toString $v.updateStrategy.maxUnavailable)) "0") }}
updateStrategy.maxSurge and updateStrategy.maxUnavailable are both 0: no pod could ever be replaced
{{- end }}
{{- range list "http_port" "grpc_port" }}
{{- with get $s . }}{{ if lt (int .) 1024 }}
settings.http_port and settings.grpc_port must be 1024 or more: the container has no right to open port {{ . }}
{{- end }}{{ end }}
{{- end }}
{{- if and (include "carousel.grpc" .) (eq (include "carousel.httpPort" .) (include "carousel.grpcPort" .)) }}
settings.http_port and settings.grpc_port are both {{ include "carousel.httpPort" . }}
{{- end }}
{{- if and $isvc (ne $v.service.type "ClusterIP") }}
service.type {{ $v.service.type }} contradicts mode inferenceservice, where KServe makes the Service
{{- end }}
{{- if and (not $isvc) $v.inferenceService.annotations }}
inferenceService.annotations without mode inferenceservice: use podAnnotations
{{- end }}
{{- if $isvc }}
{{- range $part := list "requests" "limits" }}
{{- range $kind := list "cpu" "memory" }}
{{- if not (get (get $v.resources $part | default dict) $kind) }}
resources.{{ $part }}.{{ $kind }} is missing: with mode inferenceservice KServe would fill in its own, and a request above a limit is refused
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $v.extraEnv }}
{{- if and (hasPrefix "CAROUSEL_" .name) (not (has .name (list "CAROUSEL_FAULTS" "CAROUSEL_LINEAR" "CAROUSEL_NATIVE"))) }}
extraEnv: {{ .name }} is a setting: write settings.{{ .name | trimPrefix "CAROUSEL_" | lower }}
{{- end }}
{{- if and $isvc (eq .name "PYTHONPATH") }}
extraEnv: PYTHONPATH is refused by KServe
{{- end }}
{{- end }}
{{- end }}

{{- define "carousel.validate" -}}
{{- $problems := include "carousel.problems" . | trim -}}
{{- if $problems }}{{ fail (printf "\n\nthese values cannot be:\n  - %s\n" ($problems | splitList "\n" | compact | uniq | join "\n  - ")) }}{{ end -}}
{{- end }}
