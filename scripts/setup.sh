#!/usr/bin/env bash
# Makes .venv from the lock file: finds Python 3.12, gets uv, installs, compiles to bytecode.
# Idempotent: when pyproject.toml and the lock have not changed, it returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/.planish-setup
wanted=$(cat pyproject.toml requirements.lock "$0" | cksum)
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0

say() { printf 'setup: %s\n' "$*" >&2; }

# A candidate must run: pyenv leaves shims named python3.12 on PATH that refuse when called.
is_python312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

find_python312() {
    local candidate
    for candidate in python3.12 python3 python; do
        if command -v "$candidate" >/dev/null && is_python312 "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        if [ -x "$candidate" ] && is_python312 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

find_uv() {
    local python
    if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
        command -v uv
        return
    fi
    if [ ! -x .uv/bin/uv ]; then
        for python in "$1" python3 python; do
            [ -n "$python" ] && "$python" -m pip --version >/dev/null 2>&1 && break
            python=
        done
        if [ -z "$python" ]; then
            say "neither uv nor a Python with pip was found; install one of them and run this again"
            exit 1
        fi
        say "installing uv into .uv/"
        "$python" -m pip install --quiet --target .uv uv >&2
    fi
    echo "$PWD/.uv/bin/uv"
}

python=$(find_python312)
uv=$(find_uv "$python")
if [ -z "$python" ]; then
    say "no Python 3.12 on PATH or in pyenv; asking uv to fetch one"
    if ! "$uv" python install 3.12; then
        say "uv could not fetch Python 3.12; install it (for example: apt install python3.12," \
            "or pyenv install 3.12) and run this again"
        exit 1
    fi
    python=3.12
fi

say "making .venv (the first time takes some minutes: torch is large)"
[ -x .venv/bin/python ] || "$uv" venv --quiet --python "$python" .venv
"$uv" pip sync --python .venv/bin/python --compile-bytecode requirements.lock
"$uv" pip install --python .venv/bin/python --no-deps --editable .
echo "$wanted" >"$stamp"
say "done"
