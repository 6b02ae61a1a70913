{{/* Parts of the NetworkPolicies. */}}

{{/* What every worker pod carries (service/launchers/kuberay). */}}
{{- define "planish.workerLabels" -}}
app.kubernetes.io/managed-by: planish
{{- end }}

{{- define "planish.workerPeer" -}}
namespaceSelector:
  matchLabels:
    kubernetes.io/metadata.name: {{ .namespace }}
podSelector:
  matchLabels:
    {{- include "planish.workerLabels" . | nindent 4 }}
{{- end }}

{{- define "planish.dnsEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{/* Ports on which drivers in a namespace serve metrics, with commas between. */}}
{{- define "planish.metricsPorts" -}}
{{- $found := list }}
{{- range $options := values (include "planish.clusters" .root | fromJson) }}
{{- if and (include "planish.isHere" $options) (eq $options.namespace $.namespace) $options.metrics_port }}
{{- $found = append $found (int $options.metrics_port) }}
{{- end }}
{{- end }}
{{- $found | uniq | sortAlpha | join "," }}
{{- end }}
