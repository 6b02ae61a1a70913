#!/usr/bin/env bash
# What `make test-cluster` runs: the tests that need real SLURM, Kubernetes, Ray, container images or
# Prometheus. It brings up what each part needs, and takes all of it down again, however it ends.
#
#   ONLY=slurm scripts/test_cluster.sh [OPTIONS OF PYTEST]
#
# ONLY       parts to run, of: slurm rayjobs kube helm image prometheus (these by default), and nodes,
#            Ray over two machines without a launcher, one of which is lost.
# PLANISH_TEST_KUBECONFIG   a Kubernetes of your own with KubeRay and Kueue, for kube and helm; it
#            must see this machine's folders under the same paths (kind, minikube with mounts, ...).
#            Without it one is started here by ../shared/cluster/kube-up.sh, which needs root.
#
# The parts run side by side, on two cores, in three lanes. The whole jobs of helm, a part of their own
# (whole), wait for those of slurm and kube: each rank wants a core to start on.
set -uo pipefail
cd "$(dirname "$0")/.."

shared=$(realpath -m ../shared/cluster)
usual=(slurm rayjobs kube helm image prometheus)
all=("${usual[@]}" nodes)
parts=()
for part in $(tr ',|' '  ' <<<"${ONLY:-${usual[*]}}"); do
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
    trap '' PIPE # whoever read our words may have gone already
    touch "$state/stopped"
    for lane in "${lanes[@]}"; do kill -INT "-$lane" 2>/dev/null; done
    for _ in $(seq 90); do # pytest takes its own things down
        [ -n "$(jobs -rp)" ] || break
        sleep 1
    done
    for lane in "${lanes[@]}"; do kill -KILL "-$lane" 2>/dev/null; done
    [ ! -d "$state/kube" ] || WIPE=1 "$shared/kube-down.sh" "$state/kube"
    [ ! -d "$state/images/store/overlay" ] || umount -l "$state/images/store/overlay" 2>/dev/null
    rm -rf "$state"
}
trap 'finish; exit 130' INT TERM
trap finish EXIT

say() { printf 'test-cluster: %s\n' "$*" >&2; }

# part NAME PATH... [-- OPTIONS OF PYTEST]: runs the tests of a part, and keeps what they said.
part() {
    local name=$1 paths=() started=$SECONDS code
    shift
    [ ! -e "$state/stopped" ] || return
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        [ ! -e "$1" ] || paths+=("$1")
        shift
    done
    [ "${#paths[@]}" -gt 0 ] || {
        say "$name: there are no tests"
        echo 0 >"$state/$name.code"
        return
    }
    # Somebody may have started all this with INT ignored; pytest takes its things down at INT.
    env --default-signal=INT .venv/bin/python -m pytest -m cluster --durations=15 -p no:cacheprovider "${paths[@]}" \
        "${@:2}" "${options[@]}" >"$state/$name.log" 2>&1
    code=$?
    [ "$code" != 5 ] || code=0 # nothing was selected
    echo "$code" >"$state/$name.code"
    say "$name: code $code after $((SECONDS - started)) s"
}

# The base image of all others, made once per version of the script that makes it.
base_image() {
    if [ ! -s "$PLANISH_TEST_BASE" ] && [ -x "$shared/base-image.sh" ] && [ "$(id -u)" = 0 ]; then
        say "making the base image, which takes a minute"
        "$shared/base-image.sh" "$cache/new.tar" >&2 && mv "$cache/new.tar" "$PLANISH_TEST_BASE"
    fi
    touch "$state/base-done"
}

kubernetes_up() {
    if [ -n "${PLANISH_TEST_KUBECONFIG:-}" ]; then
        export KUBECONFIG=$PLANISH_TEST_KUBECONFIG
        return
    fi
    unset KUBECONFIG # somebody's cluster is not for tests unless they say so
    [ -x "$shared/kube-up.sh" ] || { say "no $shared/kube-up.sh: no Kubernetes"; return; }
    [ "$(id -u)" = 0 ] || { say "not root: no Kubernetes"; return; }
    if [ -e /run/netns/planish ]; then
        say "a Kubernetes of kube-up.sh is up here already; name it in PLANISH_TEST_KUBECONFIG"
        return 1
    fi
    KUEUE=1 OPERATOR=1 IMAGES=$PLANISH_TEST_BASE \
        "$shared/kube-up.sh" "$state/kube" >"$state/kube.log" 2>&1 || {
        tail -n 20 "$state/kube.log" >&2
        return 1
    }
    export KUBECONFIG=$state/kube/kubeconfig
}

lane_kubernetes() {
    # However it ends, nobody waits for it any more.
    trap 'touch "$state/base-done" "$state/kube-done"
        [ -e "$state/kubernetes-up" ] || touch "$state/kubernetes-failed"' EXIT
    ! { wants kube || wants helm || wants image; } || base_image
    wants kube || wants helm || return 0
    kubernetes_up || {
        for name in kube helm; do ! wants "$name" || echo 1 >"$state/$name.code"; done
        return
    }
    printf %s "${KUBECONFIG:-}" >"$state/kubeconfig"
    mv "$state/kubeconfig" "$state/kubernetes-up"
    ! wants kube ||
        part kube tests/cluster/conformance tests/cluster/test_kuberay_jobs.py \
            tests/cluster/test_kuberay_pods.py -- -k kuberay
}

# Builds the images, and installs the control plane's beside the jobs of kube, but for the jobs of
# its own: the node has no room for both.
lane_images() {
    ! { wants image || wants helm; } || until [ -e "$state/base-done" ]; do sleep 1; done
    if wants image; then
        part image tests/cluster/image
    elif wants helm; then # which installs the control plane's image
        part image tests/cluster/image/test_service_image.py
    fi
    wants helm || return 0
    until [ -e "$state/kubernetes-up" ]; do
        [ ! -e "$state/kubernetes-failed" ] || return 0
        sleep 1
    done
    unset KUBECONFIG
    [ ! -s "$state/kubernetes-up" ] || export KUBECONFIG="$(cat "$state/kubernetes-up")"
    if [ -S "$state/kube/c.sock" ] && [ -s "$PLANISH_TEST_IMAGES/planish-service.tar" ]; then
        ctr -a "$state/kube/c.sock" -n k8s.io images import \
            "$PLANISH_TEST_IMAGES/planish-service.tar" >"$state/import.log" 2>&1
        export PLANISH_TEST_IMAGE=localhost/planish:test # it is there, or its tests fail
    fi
    part helm tests/cluster/helm -- --ignore tests/cluster/helm/test_whole.py
    until [ -e "$state/kube-done" ] && [ -e "$state/slurm-done" ]; do sleep 1; done
    part whole tests/cluster/helm/test_whole.py
}

lane_others() {
    ! wants slurm || {
        # Without it the tests of NeMo-Run's tunnels skip, and say so.
        scripts/nemo_run_env.sh .venv-nemo-run &&
            export PLANISH_NEMO_RUN_PYTHON=$PWD/.venv-nemo-run/bin/python
        part slurm tests/cluster/conformance tests/cluster/test_slurm_jobs.py \
            tests/service/launchers/slurm/test_tunnels.py -- -k slurm
    }
    touch "$state/slurm-done"
    ! wants rayjobs || part rayjobs tests/cluster/conformance -- -k ray_jobs
    ! wants nodes || part nodes tests/megatron_backend/workers/test_nodes.py \
        tests/megatron_backend/driver/test_nodes.py
    ! wants prometheus || part prometheus tests/cluster/prometheus
}

# Each lane leads a process group, by which `finish` ends it.
set -m
options=("$@")
scripts/cluster_packages.sh "${parts[@]}" || exit
export PLANISH_TEST_IMAGES=$state/images
made_by=$(cksum "$shared/base-image.sh" 2>/dev/null | cut -d' ' -f1)
export PLANISH_TEST_BASE=$PWD/$cache/base-$made_by.tar
for lane in lane_kubernetes lane_images lane_others; do
    "$lane" &
    lanes+=("$!")
done
wait "${lanes[@]}"

failed=()
told=("${parts[@]}")
! wants helm || told+=(whole)
[ ! -e "$state/image.code" ] || wants image || told+=(image)
for name in "${told[@]}"; do
    # A part that has not said how it ended did not come that far.
    if [ "$(cat "$state/$name.code" 2>/dev/null)" = 0 ]; then
        printf '== %s\n' "$name"
        [ ! -e "$state/$name.log" ] || sed -n '/= slowest/,$p' "$state/$name.log"
    else
        failed+=("$name")
    fi
done
for name in "${failed[@]}"; do
    printf '== %s\n' "$name"
    cat "$state/$name.log" 2>/dev/null
done
[ "${#failed[@]}" = 0 ] || { printf 'failed: %s\n' "${failed[*]}"; exit 1; }
