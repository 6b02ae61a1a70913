#!/usr/bin/env bash
# Makes the images' lock files from requirements.lock: the same versions and hashes, fewer packages.
# Run it after `make lock`; a test looks whether they agree.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH="$PWD/.uv/bin:$PATH"

compile() { # OUT SOURCE...
    local out=$1
    shift
    uv pip compile "$@" -c requirements.lock --python-version 3.12 --universal --generate-hashes \
        --no-emit-index-url --no-emit-find-links --no-annotate \
        --custom-compile-command "deploy/docker/lock.sh" --quiet -o "deploy/docker/$out"
}

compile build.lock deploy/docker/build.in
compile service.lock deploy/docker/service.in

# The worker's base image brings torch, built for its CUDA, and what torch stands on.
left_out=()
while read -r package; do
    left_out+=(--no-emit-package "$package")
done < <(grep -oE '^(torch|triton|(nvidia|cuda)-[a-z0-9-]+)==' requirements.lock | tr -d =)
compile worker.lock pyproject.toml --extra s3 --extra tracing "${left_out[@]}"
