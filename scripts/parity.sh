#!/usr/bin/env bash
# Computes losses, advantages and gradients with the libraries of tests/parity/packages*.txt, in
# .venv-parity, an environment of their own, and compares them with those in tests/parity/golden.
# Idempotent: the environment is made once. Arguments go on; --write writes the values anew.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv-parity/.planish-setup
wanted=$(cat tests/parity/packages.txt tests/parity/packages-no-deps.txt "$0" | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "parity: making .venv-parity (the first time takes some minutes)" >&2
    PATH="$PWD/.uv/bin:$PATH"
    [ -x .venv-parity/bin/python ] || uv venv --quiet --python .venv/bin/python .venv-parity
    uv pip install --quiet --python .venv-parity/bin/python -r tests/parity/packages.txt
    uv pip install --quiet --python .venv-parity/bin/python --no-deps \
        -r tests/parity/packages-no-deps.txt
    # verl's wheel brings a package `tests` along, which would stand before ours.
    rm -rf .venv-parity/lib/python3.12/site-packages/tests
    echo "$wanted" >"$stamp"
fi

# What is imported is compiled once and kept, even where images forbid it: torch takes seconds.
unset PYTHONDONTWRITEBYTECODE
# No model is fetched and no accelerator used: all of it is arithmetic on the CPU.
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
exec .venv-parity/bin/python -m tests.parity "$@"
