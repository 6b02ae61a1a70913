{{/* The clusters file, and what follows from it.

A kuberay cluster in this Kubernetes (one without a kubeconfig) gets what the chart knows and its
options leave out: namespace, worker image and account, user, the jobs' volume, Kueue's queue. */}}

{{/* As JSON, since templates return text: name -> options, all filled in. */}}
{{- define "planish.clusters" -}}
{{- $filled := dict }}
{{- $clusters := .Values.clusters | default (dict "kubernetes" (dict "type" "kuberay")) }}
{{- range $name, $options := $clusters }}
{{- if include "planish.isHere" $options }}
{{- $known := include "planish.kuberayDefaults" (dict "root" $ "options" $options) | fromJson }}
{{- $whole := mergeOverwrite $known (deepCopy $options) }}
{{- $volumes := include "planish.kuberayVolumes" (dict "root" $ "options" $options) | fromJsonArray }}
{{- $_ := set $whole "volumes" $volumes }}
{{- $_ := set $filled $name $whole }}
{{- else }}
{{- $_ := set $filled $name $options }}
{{- end }}
{{- end }}
{{- toJson $filled }}
{{- end }}

{{/* Whether a cluster is the Kubernetes that the chart is installed in; empty where it is not. */}}
{{- define "planish.isHere" -}}
{{- if and (eq .type "kuberay") (not .kubeconfig) (not .context) }}yes{{ end }}
{{- end }}

{{- define "planish.kuberayDefaults" -}}
{{- $values := .root.Values }}
{{- $image := $values.workers.image }}
{{- $security := $values.podSecurityContext }}
{{- $known := dict "namespace" (include "planish.jobsNamespace" .root) }}
{{- $_ := set $known "image" (printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag)) }}
{{- $_ := set $known "image_pull_secrets" $values.image.pullSecrets }}
{{- $_ := set $known "service_account" (include "planish.workerAccount" .root) }}
{{- $_ := set $known "run_as_user" $security.runAsUser }}
{{- with $security.runAsGroup }}
{{- $_ := set $known "run_as_group" . }}
{{- end }}
{{- with $security.fsGroup }}
{{- $_ := set $known "fs_group" . }}
{{- end }}
{{- if $values.metrics.podMonitor.enabled }}
{{- $_ := set $known "metrics_port" $values.metrics.podMonitor.port }}
{{- end }}
{{- if $values.kueue.create }}
{{- $_ := set $known "queue" $values.kueue.localQueue }}
{{- end }}
{{- toJson $known }}
{{- end }}

{{/* The jobs' volume, and those of the options; they may mount the jobs' path themselves. */}}
{{- define "planish.kuberayVolumes" -}}
{{- $values := .root.Values }}
{{- $own := .options.volumes | default list }}
{{- $jobs := dict "name" "jobs" "mount_path" $values.storage.path }}
{{- if eq $values.storage.type "hostPath" }}
{{- $_ := set $jobs "host_path" $values.storage.hostPath.path }}
{{- else if eq (default (include "planish.jobsNamespace" .root) .options.namespace) .root.Release.Namespace }}
{{- $_ := set $jobs "claim" (include "planish.claim" .root) }}
{{- else }}
{{- $_ := set $jobs "claim" $values.workers.existingClaim }}
{{- end }}
{{- $mounted := false }}
{{- range $own }}
{{- if eq .mount_path $values.storage.path }}{{ $mounted = true }}{{ end }}
{{- end }}
{{- if $mounted }}{{ toJson $own }}{{ else }}{{ toJson (prepend $own $jobs) }}{{ end }}
{{- end }}

{{- define "planish.jobsNamespace" -}}
{{- default .Release.Namespace .Values.workers.namespace }}
{{- end }}

{{- define "planish.clustersFile" -}}
{{- dict "clusters" (include "planish.clusters" . | fromJson) | toYaml }}
{{- end }}

{{/* Namespaces of this Kubernetes that jobs run in, with commas between; empty where none do. */}}
{{- define "planish.jobNamespaces" -}}
{{- $found := list }}
{{- range $options := values (include "planish.clusters" . | fromJson) }}
{{- if include "planish.isHere" $options }}
{{- $found = append $found $options.namespace }}
{{- end }}
{{- end }}
{{- $found | uniq | sortAlpha | join "," }}
{{- end }}
