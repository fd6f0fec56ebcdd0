#!/usr/bin/env bash
# Sets up .venv in the repository: finds a Python, installs one lock and jradix itself (editable).
#
#     scripts/setup_venv.sh demo    # requirements/demo.txt: what running jradix and the demo needs
#     scripts/setup_venv.sh dev     # requirements/dev.txt: all of demo, and what testing needs
#     scripts/setup_venv.sh cuda    # requirements/cuda.txt into .venv-cuda: jradix with jax's CUDA plug-in
#
# Does nothing when the environment already holds that lock. PYTHON=/path/to/python chooses the interpreter.
# Package index settings are the user's own (pip.conf, PIP_* variables): none stands here.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=${1:-}
if [ ! -f "requirements/$lock.txt" ]; then
    echo "usage: scripts/setup_venv.sh demo|dev|cuda" >&2
    exit 2
fi
venv=.venv
if [ "$lock" = cuda ]; then venv=.venv-cuda; fi

# A name on PATH may be a shim that fails, and a distribution's Python may lack venv: try before trusting.
is_usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Prints the first usable interpreter. The version that the lock is resolved for comes first, so that
# most machines test the same one.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3.14 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        elif [ "$candidate" = "${PYTHON:-}" ]; then
            break # the user's choice is never replaced by another
        fi
    done
    if [ -z "${PYTHON:-}" ] && candidate=$(uv python find '>=3.12' 2>/dev/null) && is_usable "$candidate"; then
        echo "$candidate"
        return
    fi
    {
        echo "No usable Python >= 3.12 (with the venv module) found."
        echo "Looked at: ${PYTHON:-python3.12, python3.13, python3.14, python3, python on PATH; pyenv versions; uv python find}."
        echo "Install one (for example 'apt install python3.12-venv', 'brew install python@3.12', 'pyenv install 3.12'"
        echo "or 'uv python install 3.12'), or name one: PYTHON=/path/to/python make ..."
    } >&2
    return 1
}

# The stamp is a copy of everything that decides what gets installed.
is_current() {
    cat "requirements/$1.txt" pyproject.toml 2>/dev/null | cmp -s - "$venv/installed-$1"
}

# The scripts in its bin/ name its absolute path: after the repository has moved, they run nothing.
is_in_place() {
    is_usable "$venv/bin/python" && grep -qF "$(pwd -P)/$venv/" "$venv/bin/pip" 2>/dev/null
}

if is_in_place; then
    if is_current "$lock" || { [ "$lock" = demo ] && is_current dev; }; then
        exit 0
    fi
else
    python=$(find_python)
    echo "Creating $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
fi

quiet=-qq # errors only
if [ -t 1 ]; then quiet=; fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

echo "Installing requirements/$lock.txt into $venv (a minute or more; a gigabyte of disk, five with CUDA)"
rm -f "$venv"/installed-*
# --no-deps: the lock is complete, and leaves out what must not be installed (see the demo extra in pyproject.toml).
# --only-binary: a package without a wheel for this Python is an error at once, not minutes of compiling.
# --no-compile: bytecode is written for what is imported, when it is.
pip install $quiet --no-deps --require-hashes --only-binary :all: --no-compile -r "requirements/$lock.txt"
pip install -qq --no-deps --no-build-isolation --editable .
cat "requirements/$lock.txt" pyproject.toml >"$venv/installed-$lock"
