{{- /* What `restricted` Pod Security asks of a pod and of a container. */ -}}
{{- define "carousel.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.podSecurityContext.runAsUser }}
runAsUser: {{ int . }}
{{- end }}
{{- with .Values.podSecurityContext.runAsGroup }}
runAsGroup: {{ int . }}
{{- end }}
{{- with .Values.podSecurityContext.fsGroup }}
fsGroup: {{ int . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "carousel.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- /* One value each: preStop, then the shutdown delay, then the drain, then a margin. */ -}}
{{- define "carousel.graceSeconds" -}}
{{- $s := .Values.settings -}}
{{- $delay := ternary 0 $s.shutdown_delay_seconds (kindIs "invalid" $s.shutdown_delay_seconds) -}}
{{- $drain := ternary 30 $s.drain_seconds (kindIs "invalid" $s.drain_seconds) -}}
{{- addf (int .Values.shutdown.preStopSeconds) (ceil (float64 $delay)) (ceil (float64 $drain)) (int .Values.shutdown.marginSeconds) | int -}}
{{- end }}

{{- define "carousel.env" -}}
{{- $fixed := dict "host" "0.0.0.0" "cache_dir" (include "carousel.cacheDir" .) "model_name" (include "carousel.modelName" .) -}}
{{- if .Values.tls.secretName -}}
{{- $_ := set $fixed "tls_certificate" "/etc/carousel/tls/tls.crt" -}}
{{- $_ := set $fixed "tls_key" "/etc/carousel/tls/tls.key" -}}
{{- if .Values.tls.clientCertificates }}{{ $_ := set $fixed "tls_client_ca" "/etc/carousel/tls/ca.crt" }}{{ end -}}
{{- end -}}
{{- if include "carousel.apiKeysSecret" . }}{{ $_ := set $fixed "api_keys" "/etc/carousel/api-keys" }}{{ end -}}
{{- if include "carousel.policyConfigMap" . }}{{ $_ := set $fixed "tenant_policy" "/etc/carousel/tenants/policy.yaml" }}{{ end -}}
{{- if ne .Values.usageLog.kind "none" }}{{ $_ := set $fixed "usage_log" "/var/log/carousel" }}{{ end -}}
{{- range $name, $value := merge (dict) .Values.settings $fixed -}}
{{- if not (kindIs "invalid" $value) }}
- name: CAROUSEL_{{ upper $name }}
  value: {{ include "carousel.text" $value | quote }}
{{- end -}}
{{- end -}}
{{- if or (include "carousel.wantsDeletionCost" .) (eq .Values.usageLog.kind "existingClaim") }}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end -}}
{{- if include "carousel.wantsDeletionCost" . }}
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- end -}}
{{- with include "carousel.huggingFaceSecret" . }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.huggingFace.key }}
{{- end -}}
{{- with include "carousel.s3Secret" . }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef:
      name: {{ include "carousel.s3Secret" $ }}
      key: {{ . }}
{{- end }}
{{- end -}}
{{- with .Values.s3.endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ . | quote }}
{{- end -}}
{{- with .Values.s3.region }}
- name: AWS_DEFAULT_REGION
  value: {{ . | quote }}
{{- end -}}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end -}}
{{- end }}

{{- /* List of root, path, period, failures: one probe. With client certificates kubelet has none to show, so the
probe runs in the pod and shows the one of tls.clientSecretName. */ -}}
{{- define "carousel.probe" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.tls.clientCertificates -}}
exec:
  command:
    - python
    - -c
    - |
      import ssl, urllib.request
      tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
      tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
      tls.load_cert_chain("/etc/carousel/tls-client/tls.crt", "/etc/carousel/tls-client/tls.key")
      urllib.request.urlopen("https://127.0.0.1:{{ include "carousel.httpPort" $root }}{{ index . 1 }}", context=tls)
{{- else -}}
httpGet:
  path: {{ index . 1 }}
  port: {{ include "carousel.httpPort" $root }}
  scheme: {{ include "carousel.scheme" $root | upper }}
{{- end }}
periodSeconds: {{ int (index . 2) }}
failureThreshold: {{ int (index . 3) }}
timeoutSeconds: {{ int $root.Values.probes.timeoutSeconds }}
{{- end }}

{{- define "carousel.probes" -}}
{{- with .Values.probes -}}
startupProbe:
  {{- list $ "/startupz" .startupPeriodSeconds (ceil (divf .startupSeconds .startupPeriodSeconds)) | include "carousel.probe" | nindent 2 }}
readinessProbe:
  {{- list $ "/readyz" .readinessPeriodSeconds 2 | include "carousel.probe" | nindent 2 }}
livenessProbe:
  {{- list $ "/livez" .livenessPeriodSeconds .livenessFailures | include "carousel.probe" | nindent 2 }}
{{- end -}}
{{- end }}

{{- /* Devices of a pod, each with a process. */ -}}
{{- define "carousel.ranks" -}}
{{- .Values.settings.tensor_parallel_size | default 1 | int -}}
{{- end }}

{{- define "carousel.mounts" -}}
- name: tmp
  mountPath: /tmp
{{- if gt (include "carousel.ranks" . | int) 1 }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if ne .Values.cache.kind "none" }}
- name: cache
  mountPath: {{ include "carousel.cacheDir" . }}
  {{- if .Values.cache.readOnly }}
  readOnly: true
  {{- end }}
{{- end }}
{{- if .Values.modelVolume.claimName }}
- name: model
  mountPath: /mnt/models
  readOnly: true
  {{- with .Values.modelVolume.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
{{- if include "carousel.apiKeysSecret" . }}
- name: api-keys
  mountPath: /etc/carousel/api-keys
  readOnly: true
{{- end }}
{{- if include "carousel.policyConfigMap" . }}
- name: tenants
  mountPath: /etc/carousel/tenants
  readOnly: true
{{- end }}
{{- if ne .Values.usageLog.kind "none" }}
- name: usage-log
  mountPath: /var/log/carousel
  {{- if eq .Values.usageLog.kind "existingClaim" }}
  subPathExpr: $(POD_NAME)
  {{- end }}
{{- end }}
{{- if .Values.tls.secretName }}
- name: tls
  mountPath: /etc/carousel/tls
  readOnly: true
{{- end }}
{{- if .Values.tls.clientCertificates }}
- name: tls-client
  mountPath: /etc/carousel/tls-client
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "carousel.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmp.sizeLimit }}
{{- if gt (include "carousel.ranks" . | int) 1 }}
{{- /* Processes on one node exchange by it what does not go from GPU to GPU; a container's own has 64 MiB. */}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: 1Gi
{{- end }}
{{- if eq .Values.cache.kind "emptyDir" }}
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.cache.sizeLimit }}
{{- else if ne .Values.cache.kind "none" }}
- name: cache
  persistentVolumeClaim:
    claimName: {{ ternary (printf "%s-cache" (include "carousel.fullname" .)) .Values.cache.existingClaim (eq .Values.cache.kind "claim") }}
{{- end }}
{{- with .Values.modelVolume.claimName }}
- name: model
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- with include "carousel.apiKeysSecret" . }}
- name: api-keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with include "carousel.policyConfigMap" . }}
- name: tenants
  configMap:
    name: {{ . }}
{{- end }}
{{- if eq .Values.usageLog.kind "emptyDir" }}
- name: usage-log
  emptyDir:
    sizeLimit: {{ .Values.usageLog.sizeLimit }}
{{- else if eq .Values.usageLog.kind "existingClaim" }}
- name: usage-log
  persistentVolumeClaim:
    claimName: {{ .Values.usageLog.existingClaim }}
{{- end }}
{{- with .Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- if .Values.tls.clientCertificates }}
- name: tls-client
  secret:
    secretName: {{ .Values.tls.clientSecretName }}
    defaultMode: 0440
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Dict of root and name: the container. HTTP stands first, because KServe leads its Service to the first port. */ -}}
{{- define "carousel.container" -}}
{{- $root := .root -}}
name: {{ .name }}
image: {{ include "carousel.image" $root | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
ports:
  - name: http
    containerPort: {{ include "carousel.httpPort" $root }}
    protocol: TCP
  {{- if include "carousel.grpc" $root }}
  - name: grpc
    containerPort: {{ include "carousel.grpcPort" $root }}
    protocol: TCP
  {{- end }}
env:
  {{- include "carousel.env" $root | trim | nindent 2 }}
{{ include "carousel.probes" $root }}
{{- with int $root.Values.shutdown.preStopSeconds }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ . }}
{{- end }}
resources:
  {{- $resources := deepCopy $root.Values.resources }}
  {{- with $root.Values.gpu }}
  {{- if .enabled }}
  {{- $_ := set $resources "limits" (merge (dict .resource (include "carousel.ranks" $root)) ($resources.limits | default dict)) }}
  {{- end }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
securityContext:
  {{- include "carousel.containerSecurity" $root | nindent 2 }}
terminationMessagePolicy: FallbackToLogsOnError
volumeMounts:
  {{- include "carousel.mounts" $root | nindent 2 }}
{{- end }}

{{- /* Dict of root and name (of the container): a pod's spec, the same for both ways to run. */ -}}
{{- define "carousel.podSpec" -}}
{{- $root := .root -}}
{{- with $root.Values -}}
serviceAccountName: {{ include "carousel.serviceAccount" $root }}
automountServiceAccountToken: {{ if include "carousel.wantsToken" $root }}true{{ else }}false{{ end }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "carousel.graceSeconds" $root }}
securityContext:
  {{- include "carousel.podSecurity" $root | nindent 2 }}
containers:
  - {{ include "carousel.container" (dict "root" $root "name" $.name) | nindent 4 | trim }}
volumes:
  {{- include "carousel.volumes" $root | nindent 2 }}
{{- with .imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat .tolerations (ternary .gpu.tolerations list .gpu.enabled) }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ .topologyKey }}
    maxSkew: {{ .maxSkew | default 1 | int }}
    whenUnsatisfiable: {{ .whenUnsatisfiable | default "ScheduleAnyway" }}
    labelSelector:
      matchLabels:
        {{- include "carousel.selector" (dict "root" $root "component" "predictor") | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
  {{- end }}
{{- end }}
{{- end -}}
{{- end }}

{{- /* Pods start anew when a secret changes that is read once. */ -}}
{{- define "carousel.podAnnotations" -}}
{{- $own := dict -}}
{{- with .Values.huggingFace.token }}{{ $_ := set $own "checksum/hugging-face" (sha256sum .) }}{{ end -}}
{{- with .Values.s3.secretAccessKey }}{{ $_ := set $own "checksum/s3" (sha256sum (print $.Values.s3.accessKeyId .)) }}{{ end -}}
{{- if eq .Values.metrics.scrape "annotations" -}}
{{- $own = merge $own (dict
      "prometheus.io/scrape" "true"
      "prometheus.io/port" (include "carousel.httpPort" .)
      "prometheus.io/path" "/metrics"
      "prometheus.io/scheme" (include "carousel.scheme" .)) -}}
{{- end -}}
{{- with merge (dict) .Values.podAnnotations $own }}{{ toYaml . }}{{ end -}}
{{- end }}
