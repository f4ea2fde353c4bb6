{{- /* Matchers of the release's own pods, whether its Deployment is the chart's or KServe's. */ -}}
{{- define "carousel.metricsOf" -}}
{namespace="{{ .Release.Namespace }}",pod=~"{{ include "carousel.workload" . }}-[a-z0-9]+-[a-z0-9]{5}"}
{{- end }}

{{- /* List of root, bad (a PromQL ratio with WINDOW in it), objective: fast and slow burn, two windows each. */ -}}
{{- define "carousel.burns" -}}
{{- $bad := index . 1 -}}
{{- $budget := subf 1 (index . 2) -}}
{{- range list (list 14.4 "1h" "5m" "critical" "2%") (list 6 "6h" "30m" "warning" "5%") }}
{{- $most := round (mulf (index . 0) $budget) 6 }}
- factor: {{ index . 0 }}
  severity: {{ index . 3 }}
  window: {{ index . 1 }}
  spent: {{ index . 4 | quote }}
  for: {{ ternary "2m" "15m" (eq (index . 1) "1h") }}
  expr: {{ printf "(%s) > %v\nand\n(%s) > %v"
      ($bad | replace "WINDOW" (index . 1)) $most ($bad | replace "WINDOW" (index . 2)) $most | toJson }}
{{- end }}
{{- end }}

{{- define "carousel.badRequests" -}}
{{- $pods := include "carousel.metricsOf" . -}}
{{- $overload := printf "%s,reason=~\"queue_full|unavailable\"}" (trimSuffix "}" $pods) -}}
(sum(rate(carousel_requests_failed_total{{ $pods }}[WINDOW])) + sum(rate(carousel_request_refusals_total{{ $overload }}[WINDOW])))
  / (sum(rate(carousel_requests_admitted_total{{ $pods }}[WINDOW])) + sum(rate(carousel_request_refusals_total{{ $overload }}[WINDOW])))
{{- end }}

{{- define "carousel.slowRequests" -}}
{{- $pods := include "carousel.metricsOf" . -}}
{{- $bound := .Values.alerts.slo.ttftSeconds -}}
{{- $le := ternary (printf "%.1f" (float64 $bound)) (toString $bound) (eq (float64 $bound) (floor (float64 $bound))) -}}
1 - sum(rate(carousel_time_to_first_token_seconds_bucket{{ trimSuffix "}" $pods }},le="{{ $le }}"}[WINDOW]))
  / sum(rate(carousel_time_to_first_token_seconds_count{{ $pods }}[WINDOW]))
{{- end }}

{{- /* List of root, name, severity, for, expr, summary, description: one alert. */ -}}
{{- define "carousel.alert" -}}
{{- $root := index . 0 -}}
- alert: {{ index . 1 }}
  expr: |-
    {{- index . 4 | nindent 4 }}
  for: {{ index . 3 }}
  labels:
    {{- toYaml (merge (dict "severity" (index . 2) "release" $root.Release.Name "namespace" $root.Release.Namespace) $root.Values.alerts.labels) | nindent 4 }}
  annotations:
    summary: {{ index . 5 | quote }}
    description: {{ index . 6 | quote }}
    {{- with $root.Values.alerts.runbookURL }}
    runbook_url: {{ printf "%s#%s" . (index $ 1 | lower) | quote }}
    {{- end }}
{{- end }}

{{- /* Sums over the pods that dashboards and bills ask for again and again. */ -}}
{{- define "carousel.records" -}}
{{- $pods := include "carousel.metricsOf" . -}}
{{- range $kind := list "requests" "device_seconds" "slot_seconds" "kv_block_seconds" "cost" }}
- record: tenant:carousel_tenant_{{ $kind }}:rate5m
  expr: sum by (namespace, model_name, tenant) (rate(carousel_tenant_{{ $kind }}_total{{ $pods }}[5m]))
{{- end }}
- record: tenant_kind:carousel_tenant_tokens:rate5m
  expr: sum by (namespace, model_name, tenant, kind) (rate(carousel_tenant_tokens_total{{ $pods }}[5m]))
- record: tenant_quota:carousel_tenant_refusals:rate5m
  expr: sum by (namespace, model_name, tenant, quota) (rate(carousel_tenant_refusals_total{{ $pods }}[5m]))
{{- end }}

{{- define "carousel.rules" -}}
{{- $pods := include "carousel.metricsOf" . -}}
{{- $a := .Values.alerts -}}
{{- $pod := "{{ $labels.pod }}" -}}
{{- $value := "{{ $value | humanizeDuration }}" -}}
{{- $share := "{{ $value | humanizePercentage }}" -}}
{{ list . "CarouselQueueOld" "warning" "2m"
  (printf "max by (pod) (carousel_oldest_wait_seconds%s) > %v" $pods $a.queueAgeSeconds)
  (printf "The oldest request of %s has waited for %s" $pod $value)
  "More arrives than the pods compute. Are there as many pods as maxReplicas allows, and are they all ready? Compare carousel_estimated_queue_seconds of all pods: if only one is slow, it is that pod."
  | include "carousel.alert" }}
{{ range list . (include "carousel.badRequests" .) $a.slo.availability | include "carousel.burns" | fromYamlArray -}}
{{ list $ "CarouselErrorBudgetBurn" .severity .for .expr
  (printf "%s of requests fail or are refused for overload" $share)
  (printf "The objective is %v. At this rate %s of a month's budget goes in %s. carousel_request_refusals_total says whether the queue was full or no engine was there; failed requests have their cause in the log." $a.slo.availability .spent .window)
  | include "carousel.alert" }}
{{ end -}}
{{ range list . (include "carousel.slowRequests" .) $a.slo.ttftObjective | include "carousel.burns" | fromYamlArray -}}
{{ list $ "CarouselFirstTokenBudgetBurn" .severity .for .expr
  (printf "%s of requests wait for more than %v s for their first token" $share $a.slo.ttftSeconds)
  (printf "The objective is %v of them within that. At this rate %s of a month's budget goes in %s. carousel_request_queue_time_seconds tells waiting from computing." $a.slo.ttftObjective .spent .window)
  | include "carousel.alert" }}
{{ end -}}
{{ list . "CarouselNoProgress" "critical" "1m"
  (printf "max by (pod) (carousel_engine_alive%s) == 0\nor\n(min by (pod) (min_over_time(carousel_requests_live%s[%vs])) > 0\nand\nsum by (pod) (increase(carousel_steps_total%s[%vs])) == 0)" $pods $pods $a.noProgressSeconds $pods $a.noProgressSeconds)
  (printf "The engine of %s does no step while requests are in it" $pod)
  "Its liveness probe should have restarted it: see settings.stall_seconds, and the log of the container before, by kubectl logs --previous."
  | include "carousel.alert" }}
{{ list . "CarouselRestarts" "warning" "1m"
  (printf "max by (pod) (changes(process_start_time_seconds%s[30m])) >= %v" $pods $a.restarts)
  (printf "%s has restarted {{ $value }} times in 30 minutes" $pod)
  "The last words of the container before are in kubectl describe pod (Last State, Message). OOMKilled: lower settings.kv_cache_memory or raise resources.limits.memory."
  | include "carousel.alert" }}
{{ list . "CarouselKVPressure" "warning" "10m"
  (printf "max by (pod) (carousel_kv_cache_usage_perc%s) > %v\nand\nsum by (pod) (rate(carousel_num_preemptions_total%s[5m])) > 0" $pods $a.kvUsage $pods)
  (printf "KV memory of %s is full to %s, and sequences lose their place" $pod $share)
  "Work is computed twice. Raise settings.kv_cache_memory, lower settings.max_batch_sequences, or add pods."
  | include "carousel.alert" }}
{{ list . "CarouselQuotaRefusals" "warning" "15m"
  (printf "sum by (tenant) (rate(carousel_tenant_refusals_total%s[5m]))\n  / (sum by (tenant) (rate(carousel_tenant_refusals_total%s[5m])) + sum by (tenant) (rate(carousel_tenant_requests_total%s[5m])))\n  > %v" $pods $pods $pods $a.quotaRefusals)
  (printf "%s of what tenant {{ $labels.tenant }} asks is refused by its quotas" $share)
  "Its clients ask for more than its policy gives: carousel_tenant_refusals_total says which quota. Raise that one, or tell the tenant."
  | include "carousel.alert" }}
{{ list . "CarouselTenantPolicyInvalid" "warning" "5m"
  (printf "max by (pod) (carousel_tenant_policy_valid%s) == 0" $pods)
  (printf "%s has a tenants' policy that it cannot take" $pod)
  "The one before stays in force. The log says which field is wrong and what is allowed."
  | include "carousel.alert" }}
{{ list . "CarouselUsageLogFails" "critical" "5m"
  (printf "sum by (pod) (increase(carousel_usage_log_failures_total%s[5m])) > 0\nor\nsum by (pod) (increase(carousel_usage_log_lost_total%s[5m])) > 0" $pods $pods)
  (printf "%s cannot write its usage log" $pod)
  "Lines wait in memory and are lost beyond 100,000. Is the volume full, or away? carousel_usage_log_pending says how many wait."
  | include "carousel.alert" }}
{{- if gt (int (ternary .Values.autoscaling.minReplicas (include "carousel.replicas" .) (ne .Values.autoscaling.type "none"))) 0 }}
{{ list . "CarouselNotReady" "critical" "5m"
  (printf "(sum(carousel_ready%s) or vector(0)) == 0" $pods)
  "No pod takes requests"
  "kubectl get pods and kubectl describe pod say why: image, node, probe, or a setting that the first line of the log names."
  | include "carousel.alert" }}
{{- end }}
{{- end }}
