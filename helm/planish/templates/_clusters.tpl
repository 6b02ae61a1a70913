{{/* The clusters file, and what follows from it.

A kuberay cluster in this Kubernetes (one without a kubeconfig) gets what the chart knows and its
options leave out: namespace, worker image and account, user, the jobs' volume, Kueue's queue. */}}

{{/* As JSON, since templates return text: name -> options, all filled in. */}}
{{- define "planish.clusters" -}}
{{- $filled := dict }}
{{- $clusters := .Values.clusters | default (dict "kubernetes" (dict "type" "kuberay")) }}
{{- range $name, $options := $clusters }}
{{- if and (eq $options.type "kuberay") (not $options.kubeconfig) }}
{{- $known := include "planish.kuberayDefaults" (dict "root" $ "options" $options) | fromJson }}
{{- $_ := set $filled $name (mergeOverwrite $known (deepCopy $options)) }}
{{- else }}
{{- $_ := set $filled $name $options }}
{{- end }}
{{- end }}
{{- toJson $filled }}
{{- end }}

{{- define "planish.kuberayDefaults" -}}
{{- $root := .root }}
{{- $namespace := .options.namespace | default (include "planish.jobsNamespace" $root) }}
{{- $claim := include "planish.claim" $root }}
{{- if ne $namespace $root.Release.Namespace }}
{{- $claim = $root.Values.workers.existingClaim }}
{{- end }}
{{- $volume := include "planish.jobsVolume" (dict "root" $root "name" "jobs" "claim" $claim) | fromYaml }}
{{- $mount := dict "name" "jobs" "mountPath" $root.Values.storage.path }}
{{- $image := printf "%s:%s" $root.Values.workers.image.repository (default $root.Chart.AppVersion $root.Values.workers.image.tag) }}
{{- $known := dict "namespace" $namespace "image" $image }}
{{- $_ := set $known "service_account" (include "planish.workerAccount" $root) }}
{{- with $root.Values.podSecurityContext.runAsUser }}
{{- $_ := set $known "run_as_user" . }}
{{- end }}
{{- with $root.Values.podSecurityContext.fsGroup }}
{{- $_ := set $known "fs_group" . }}
{{- end }}
{{- if $root.Values.kueue.create }}
{{- $_ := set $known "queue" $root.Values.kueue.localQueue }}
{{- end }}
{{- $_ := set $known "volumes" (list $volume) }}
{{- $_ := set $known "volume_mounts" (list $mount) }}
{{- toJson $known }}
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
{{- if and (eq $options.type "kuberay") (not $options.kubeconfig) }}
{{- $found = append $found $options.namespace }}
{{- end }}
{{- end }}
{{- $found | uniq | sortAlpha | join "," }}
{{- end }}
