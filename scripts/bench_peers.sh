#!/usr/bin/env bash
# Makes .venv-bench, the environment of the libraries that `make bench` measures beside ours.
# Idempotent: when tests/bench/peers.txt has not changed, it returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv-bench/.planish-setup
wanted=$(cat tests/bench/peers.txt "$0" | cksum)
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0

printf 'bench: making .venv-bench (the first time takes some minutes)\n' >&2
PATH="$PWD/.uv/bin:$PATH"
[ -x .venv-bench/bin/python ] || uv venv --quiet --python .venv/bin/python .venv-bench
uv pip install --quiet --python .venv-bench/bin/python -r tests/bench/peers.txt
echo "$wanted" >"$stamp"
