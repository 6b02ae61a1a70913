{{/* Names, labels and the parts that several templates share. */}}

{{- define "planish.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* At most 40 characters, so that suffixes still fit into 63. */}}
{{- define "planish.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "planish.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "planish.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* What a Deployment selects by: never changes over upgrades. */}}
{{- define "planish.selector" -}}
app.kubernetes.io/name: {{ include "planish.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "planish.labels" -}}
{{ include "planish.selector" . }}
app.kubernetes.io/part-of: planish
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "planish.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "planish.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "planish.workerAccount" -}}
{{- if .Values.workers.serviceAccount.create }}
{{- default (printf "%s-worker" (include "planish.fullname" .)) .Values.workers.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.workers.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "planish.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Whether there is a PostgreSQL, which many replicas may share; empty where there is none. */}}
{{- define "planish.hasPostgres" -}}
{{- if or .Values.postgresql.enabled .Values.database.url .Values.database.existingSecret }}yes{{ end }}
{{- end }}

{{/* Whether that PostgreSQL is there before the chart is installed. */}}
{{- define "planish.hasExternalPostgres" -}}
{{- if or .Values.database.url .Values.database.existingSecret }}yes{{ end }}
{{- end }}

{{/* Whether the SQLite file has a claim of its own; empty where it has not. */}}
{{- define "planish.hasSqliteClaim" -}}
{{- if not (or (include "planish.hasPostgres" .) (eq .Values.storage.type "hostPath")) }}yes{{ end }}
{{- end }}

{{/* Whether the claim that is made for the jobs is for one node alone; empty where it is not. */}}
{{- define "planish.hasOneNodeClaim" -}}
{{- with .Values.storage }}
{{- if and (eq .type "claim") (not .claim.existing) (not (has "ReadWriteMany" .claim.accessModes)) }}yes{{ end }}
{{- end }}
{{- end }}

{{- define "planish.postgresName" -}}
{{- printf "%s-postgresql" (include "planish.fullname" .) }}
{{- end }}

{{/* The variable that holds the database's URL. `secret` is where a URL of the values was put. */}}
{{- define "planish.databaseVariable" -}}
{{- $root := .root }}
{{- with $root.Values.database }}
- name: PLANISH_DATABASE_URL
  valueFrom:
    secretKeyRef:
      {{- if .existingSecret }}
      name: {{ .existingSecret }}
      key: {{ .existingSecretKey }}
      {{- else }}
      name: {{ $.secret }}
      key: url
      {{- end }}
{{- end }}
{{- end }}

{{- define "planish.bootstrapSecret" -}}
{{- default (printf "%s-bootstrap-key" (include "planish.fullname" .)) .Values.bootstrapKey.existingSecret }}
{{- end }}

{{- define "planish.bootstrapSecretKey" -}}
{{- if .Values.bootstrapKey.existingSecret }}{{ .Values.bootstrapKey.existingSecretKey }}{{ else }}api-key{{ end }}
{{- end }}

{{- define "planish.claim" -}}
{{- default (printf "%s-jobs" (include "planish.fullname" .)) .Values.storage.claim.existing }}
{{- end }}

{{/* The jobs' volume as a pod names it. Takes root, name, claim. */}}
{{- define "planish.jobsVolume" -}}
{{- $storage := .root.Values.storage -}}
name: {{ .name }}
{{- if eq $storage.type "hostPath" }}
hostPath:
  path: {{ $storage.hostPath.path }}
  type: Directory
{{- else if eq $storage.type "nfs" }}
nfs:
  server: {{ $storage.nfs.server }}
  path: {{ $storage.nfs.path }}
{{- else }}
persistentVolumeClaim:
  claimName: {{ .claim }}
{{- end }}
{{- end }}

{{/* Kubernetes' level "restricted", but for the volumes' kind. */}}
{{- define "planish.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* What of a pod's placement all pods of the control plane share. */}}
{{- define "planish.placement" -}}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "planish.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "planish.publicUrl" -}}
{{- default (printf "http://%s.%s.svc:%v" (include "planish.fullname" .) .Release.Namespace .Values.service.port) .Values.server.publicUrl }}
{{- end }}
