#!/usr/bin/env bash
# Builds .venv-megatron: the real Megatron-Core as the judge of what we write, kept out of the main environment.
# torch and its dependencies are not installed a second time: a .pth file lends those of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-megatron
.venv/bin/python -m venv --clear --without-pip "$VENV"
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
lent=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# --no-deps: its dependencies are CUDA packages that loading a checkpoint does not touch.
# --ignore-requires-python: it asks for 3.12 and ships wheels for 3.11, lacking only typing.override (stand-ins/ has it).
for try in 1 2 3; do
    .venv/bin/python -m pip --python "$VENV/bin/python" install -qq --disable-pip-version-check --no-input \
        --progress-bar off --no-deps --ignore-requires-python -r constraints-megatron.txt && break
    [ "$try" -lt 3 ] || { echo "setup: could not install megatron-core" >&2; exit 1; }
    sleep $((try * 5))
done
echo "$lent" >"$site/lent-by-main.pth"
touch "$VENV/.installed"
