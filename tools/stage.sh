#!/usr/bin/env bash
# Runs one stage of the set-up: prints its name, and the seconds it took once it has ended. What its command says is
# shown only if it fails, with the command's status.
#   tools/stage.sh "packages that run Baton" .venv/bin/pip install -e .
set -euo pipefail

name=$1
shift
said=$(mktemp)
trap 'rm -f "$said"' EXIT
printf '%s ... ' "$name"
if "$@" > "$said" 2>&1; then
    printf '%d s\n' "$SECONDS"
else
    status=$?
    printf 'failed after %d s: %s\n' "$SECONDS" "$*"
    cat "$said" >&2
    exit "$status"
fi
