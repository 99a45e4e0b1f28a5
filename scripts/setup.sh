#!/usr/bin/env bash
# Builds the project's environment in .venv: exactly the pinned versions of constraints.txt, the project editable.
# Safe to run again: an environment that works is brought up to date, one that does not is built anew.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
PIP_VERSION=26.3    # older ones backtrack for minutes over boto3 and prefect's dependencies

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup: no Python >= 3.11 with venv and ensurepip found; install one, or name it: make PYTHON=/path/to/python3.11" >&2
    return 1
}

# One lost connection should not cost the whole set-up: pip repeats requests, and we repeat pip.
pip_install() {
    local try
    for try in 1 2 3; do
        if "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-input --progress-bar off \
            --retries 5 --timeout 60 "$@"; then
            return
        fi
        echo "setup: pip install failed (try $try of 3): $*" >&2
        sleep $((try * 5))
    done
    return 1
}

if ! "$VENV/bin/python" -c 'import pip' >/dev/null 2>&1; then
    python=$(find_python)
    echo "setup: creating $VENV with $("$python" --version) ($python)"
    "$python" -m venv --clear "$VENV"
fi
echo "setup: installing the pinned dependencies into $VENV (a minute or two the first time)"
pip_install "pip==$PIP_VERSION"
# The build backend is installed like everything else, pinned; an isolated build would fetch an unpinned one.
pip_install -c constraints.txt setuptools
pip_install -c constraints.txt --no-build-isolation -e '.[dev]'
touch "$VENV/.installed"
