#!/usr/bin/env bash
# Runs tests/transformer_engine in .venv-te, an environment with Transformer Engine and
# Megatron-Bridge. Both can be imported and asked without a GPU; their kernels cannot run.
# Idempotent: the environment is made once. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels=../shared/wheels
wheel=$wheels/transformer_engine_torch-2.20.2-cp312-cp312-linux_x86_64.whl
if [ ! -f "$wheel" ]; then
    echo "test-te: skipped: $wheel is not there. It is Transformer Engine's extension for torch" \
        "2.14.1, which takes a CUDA toolkit to build from source." >&2
    exit 0
fi

stamp=.venv-te/.planish-setup
wanted=$(cat "$0" scripts/test_te.txt | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "test-te: making .venv-te" >&2
    PATH="$PWD/.uv/bin:$PATH"
    [ -x .venv-te/bin/python ] || uv venv --quiet --python .venv/bin/python .venv-te
    uv pip install --python .venv-te/bin/python --compile-bytecode \
        -r scripts/test_te.txt "$wheel"
    # Its requirements ask for packages that contradict each other, and that a converter of
    # weights never imports.
    uv pip install --python .venv-te/bin/python --no-deps megatron-bridge==0.6.2
    echo "$wanted" >"$stamp"
fi

exec .venv-te/bin/python -m pytest -p no:cacheprovider tests/transformer_engine "$@"
