#!/usr/bin/env bash
# Makes an environment with NeMo-Run, for clusters of type `slurm` with a tunnel of type `ssh`:
#
#     scripts/nemo_run_env.sh DIR      then: nemo_run_python: DIR/bin/python
#
# leptonai 0.27.0, since NeMo-Run imports a part of it that later releases have not. Idempotent.
set -euo pipefail
[ $# -eq 1 ] || { printf 'usage: %s DIR\n' "$0" >&2; exit 64; }
root=$(cd "$(dirname "$0")/.." && pwd)
wanted='nemo-run==0.11.1 leptonai==0.27.0'
[ "$(cat "$1/.planish-setup" 2>/dev/null)" = "$wanted" ] && exit 0
PATH="$root/.uv/bin:$PATH"
[ -x "$1/bin/python" ] || uv venv --quiet --python "$root/.venv/bin/python" "$1"
# shellcheck disable=SC2086
uv pip install --quiet --python "$1/bin/python" $wanted
printf '%s\n' "$wanted" >"$1/.planish-setup"
