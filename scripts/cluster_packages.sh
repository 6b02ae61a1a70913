#!/usr/bin/env bash
# Installs the Debian packages that tests on real clusters need (`make test-cluster`).
#
#   scripts/cluster_packages.sh [slurm|nodes|rayjobs|kube|helm|image|prometheus]...    (all by default)
#
# Idempotent, and quick where they are there. Where they cannot be installed it says so and ends
# well: the tests that miss something skip, each with its reason.
set -euo pipefail

slurm=(
    slurmctld slurmd slurmdbd munge slurm-client slurm-wlm-basic-plugins slurm-wlm-mysql-plugin
    mariadb-server openssh-client openssh-server prometheus
)
images=(podman buildah runc netavark aardvark-dns catatonit debootstrap)
kube=(
    containerd runc containernetworking-plugins iptables nftables conntrack catatonit iproute2
    xz-utils openssl curl debootstrap
)

wanted=(procps)
for part in "${@:-all}"; do
    case "$part" in
        slurm) wanted+=("${slurm[@]}") ;;
        kube) wanted+=("${kube[@]}") ;;
        helm) wanted+=("${kube[@]}" "${images[@]}" postgresql prometheus) ;;
        image) wanted+=("${images[@]}") ;;
        prometheus) wanted+=(prometheus prometheus-alertmanager) ;;
        nodes | rayjobs) ;;
        all) wanted+=("${slurm[@]}" "${kube[@]}" "${images[@]}" prometheus prometheus-alertmanager postgresql) ;;
        *) printf 'unknown part %s\n' "$part" >&2; exit 64 ;;
    esac
done

missing=()
for package in $(printf '%s\n' "${wanted[@]}" | sort -u); do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ "${#missing[@]}" -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    printf 'test-cluster: not installed, which needs root and apt-get: %s\n' "${missing[*]}" >&2
    exit 0
fi
printf 'test-cluster: installing %s\n' "${missing[*]}" >&2
# Their services stay off: the tests start what they need, on ports of their own.
if [ ! -e /usr/sbin/policy-rc.d ]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
fi
log=$(mktemp)
install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1
}
install || { apt-get update >"$log" 2>&1 && install; } || {
    tail -n 20 "$log" >&2
    printf 'test-cluster: could not install them; see above, and %s\n' "$log" >&2
    exit 0
}
rm -f "$log"
