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
