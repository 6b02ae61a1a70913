#!/usr/bin/env bash
# What `make test-cluster` runs: the tests that need real SLURM, Kubernetes, Ray, container images or
# Prometheus. It brings up what each part needs, and takes all of it down again, however it ends.
#
#   ONLY=slurm scripts/test_cluster.sh [OPTIONS OF PYTEST]
#
# ONLY       parts to run, of: slurm rayjobs kube helm image prometheus (all by default).
# PLANISH_TEST_KUBECONFIG   a Kubernetes of your own with KubeRay and Kueue, for kube and helm; it
#            must see this machine's folders under the same paths (kind, minikube with mounts, ...).
#            Without it one is started here by ../shared/cluster/kube-up.sh, which needs root.
#
# The parts run two at a time, on two cores: the long ones on Kubernetes in a row, the others beside.
set -uo pipefail
cd "$(dirname "$0")/.."

shared=$(realpath -m ../shared/cluster)
all=(slurm rayjobs kube helm image prometheus)
parts=()
for part in $(tr ',|' '  ' <<<"${ONLY:-${all[*]}}"); do
    [[ " ${all[*]} " == *" $part "* ]] || {
        printf 'ONLY=%s: the parts are %s\n' "$part" "${all[*]}" >&2
        exit 64
    }
    parts+=("$part")
done
wants() { [[ " ${parts[*]} " == *" $1 "* ]]; }

# Short, for Unix sockets; any user may look in, as those of pods do.
state=$(mktemp -d /tmp/planish-XXXXXX)
chmod 755 "$state"
cache=.cluster
mkdir -p "$cache"
lanes=()
finish() {
    trap - EXIT INT TERM
    for lane in "${lanes[@]}"; do kill -INT "-$lane" 2>/dev/null; done
    wait # pytest takes its own things down
    [ ! -d "$state/kube" ] || WIPE=1 "$shared/kube-down.sh" "$state/kube"
    [ ! -d "$state/containers/overlay" ] || umount -l "$state/containers/overlay" 2>/dev/null
    rm -rf "$state"
}
trap 'finish; exit 130' INT TERM
trap finish EXIT

say() { printf 'test-cluster: %s\n' "$*" >&2; }

# part NAME PATH... [-- OPTIONS OF PYTEST]: runs the tests of a part, and keeps what they said.
part() {
    local name=$1 paths=() started=$SECONDS code
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        [ ! -e "$1" ] || paths+=("$1")
        shift
    done
    [ "${#paths[@]}" -gt 0 ] || { say "$name: there are no tests"; return; }
    .venv/bin/python -m pytest -m cluster --durations=15 -p no:cacheprovider "${paths[@]}" \
        "${@:2}" "${options[@]}" >"$state/$name.log" 2>&1
    code=$?
    [ "$code" != 5 ] || code=0 # nothing was selected
    echo "$code" >"$state/$name.code"
    say "$name: code $code after $((SECONDS - started)) s"
}

# The base image, made once per version of the script that makes it.
base_image() {
    local made=$cache/base-$(cksum <"$shared/base-image.sh" | cut -d' ' -f1).tar
    if [ ! -s "$made" ]; then
        say "making the base image, which takes a minute"
        "$shared/base-image.sh" "$made.part.tar" && mv "$made.part.tar" "$made" || return
    fi
    realpath "$made"
}

# The control plane's image, as an archive for the node, built as a user does.
service_image() {
    local base=$1 storage=$state/containers ca=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
    mkdir -p "$storage"
    printf '[storage]\ndriver="overlay"\ngraphroot="%s"\nrunroot="%s"\n' \
        "$storage" "$storage/run" >"$storage/storage.conf"
    export CONTAINERS_STORAGE_CONF=$storage/storage.conf
    say "building the control plane's image"
    {
        buildah pull "docker-archive:$base" &&
            BUILDER=buildah BASE=localhost/python:3.12-slim CA_BUNDLE=$ca \
                deploy/docker/build.sh service localhost/planish:test -- \
                --runtime runc --network host --volume "$ca:/etc/ssl/certs/ca-certificates.crt:ro" &&
            buildah push localhost/planish:test \
                "docker-archive:$state/service.tar:localhost/planish:test"
    } >"$state/service-image.log" 2>&1 || {
        tail -n 20 "$state/service-image.log" >&2
        return 1
    }
}

kubernetes_up() {
    if [ -n "${PLANISH_TEST_KUBECONFIG:-}" ]; then
        export KUBECONFIG=$PLANISH_TEST_KUBECONFIG
        return
    fi
    [ -x "$shared/kube-up.sh" ] || { say "no $shared/kube-up.sh: no Kubernetes"; return; }
    [ "$(id -u)" = 0 ] || { say "not root: no Kubernetes"; return; }
    if [ -e /run/netns/planish ]; then
        say "a Kubernetes of kube-up.sh is up here already; name it in PLANISH_TEST_KUBECONFIG"
        return 1
    fi
    local images
    images=$(base_image) || return
    if wants helm; then
        service_image "$images" && images+=" $state/service.tar"
    fi
    KUEUE=1 OPERATOR=1 IMAGES=$images "$shared/kube-up.sh" "$state/kube" >"$state/kube.log" 2>&1 || {
        tail -n 20 "$state/kube.log" >&2
        return 1
    }
    export KUBECONFIG=$state/kube/kubeconfig
}

lane_kubernetes() {
    wants kube || wants helm || return 0
    kubernetes_up || { for name in kube helm; do echo 1 >"$state/$name.code"; done; return; }
    ! wants kube || part kube tests/cluster/conformance tests/cluster/test_kuberay_jobs.py -- -k kuberay
    ! wants helm || part helm tests/cluster/helm
}

lane_others() {
    ! wants slurm || part slurm tests/cluster/conformance tests/cluster/test_slurm_jobs.py -- -k slurm
    ! wants rayjobs || part rayjobs tests/cluster/conformance -- -k ray_jobs
    ! wants prometheus || part prometheus tests/cluster/prometheus
    ! wants image || part image tests/cluster/image
}

# Each lane leads a process group, by which `finish` ends it.
set -m
options=("$@")
scripts/cluster_packages.sh "${parts[@]}"
for lane in lane_kubernetes lane_others; do
    "$lane" &
    lanes+=("$!")
done
wait "${lanes[@]}"

failed=()
for name in "${parts[@]}"; do
    [ -e "$state/$name.code" ] || continue
    if [ "$(cat "$state/$name.code")" = 0 ]; then
        printf '== %s\n' "$name"
        sed -n '/= slowest/,$p' "$state/$name.log"
    else
        failed+=("$name")
    fi
done
for name in "${failed[@]}"; do
    printf '== %s\n' "$name"
    cat "$state/$name.log" 2>/dev/null
done
[ "${#failed[@]}" = 0 ] || { printf 'failed: %s\n' "${failed[*]}"; exit 1; }
