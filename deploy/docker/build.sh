#!/usr/bin/env bash
# Builds Planish's images with docker, podman or buildah, whichever is there.
#
#   deploy/docker/build.sh service|worker [TAG] [-- OPTIONS OF THE BUILD COMMAND...]
#
#   deploy/docker/build.sh service registry.example.org/planish-service:0.1.0
#   deploy/docker/build.sh service planish-service:slurm -- --build-arg DEBIAN_PACKAGES=slurm-client
#   BUILDER=podman CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt deploy/docker/build.sh worker
#
# BUILDER    docker, podman or buildah; by default the first of them that is installed.
# BASE       another base image.
# CA_BUNDLE  certificates (PEM) that the package index needs here.
# PIP_CONF   a pip.conf of your own, such as one that names an index; with CA_BUNDLE it must say
#            `cert = /run/secrets/ca`.
#            Both are mounted while building and are no part of the image.
set -euo pipefail

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0" >&2
    exit 2
}

image=${1:-}
[ "$image" = service ] || [ "$image" = worker ] || usage
shift
case "$image" in service) tag=planish-service:latest ;; worker) tag=planish-worker:latest ;; esac
if [ $# -gt 0 ] && [ "$1" != -- ]; then
    tag=$1
    shift
fi
if [ $# -gt 0 ]; then
    [ "$1" = -- ] || usage
    shift
fi
# Paths are the caller's.
CA_BUNDLE=${CA_BUNDLE:+$(realpath "$CA_BUNDLE")}
PIP_CONF=${PIP_CONF:+$(realpath "$PIP_CONF")}
cd "$(dirname "$0")/../.."

builder=${BUILDER:-}
if [ -z "$builder" ]; then
    for candidate in docker podman buildah; do
        if command -v "$candidate" >/dev/null; then
            builder=$candidate
            break
        fi
    done
fi

options=(--file "deploy/docker/$image.Dockerfile" --tag "$tag")
[ -z "${BASE:-}" ] || options+=(--build-arg "BASE=$BASE")

case "$builder" in
    docker) command=(docker build) ;;
    # Their own default, the OCI format, has no place for the health check.
    podman) command=(podman build --format docker --layers) ;;
    buildah) command=(buildah build --format docker --layers) ;;
    "") echo "none of docker, podman and buildah is installed" >&2; exit 1 ;;
    *) echo "BUILDER must be docker, podman or buildah; it is $builder" >&2; exit 2 ;;
esac

pip_conf=$PIP_CONF
if [ -n "$CA_BUNDLE" ]; then
    options+=(--secret "id=ca,src=$CA_BUNDLE")
    if [ -z "$pip_conf" ]; then
        pip_conf=$(mktemp)
        trap 'rm -f "$pip_conf"' EXIT
        # pip has certificates of its own and does not look at the system's.
        printf '[global]\ncert = /run/secrets/ca\n' >"$pip_conf"
    fi
fi
[ -z "$pip_conf" ] || options+=(--secret "id=pip.conf,src=$pip_conf")

"${command[@]}" "${options[@]}" "$@" .
