#!/usr/bin/env bash
# Runs the server on a machine with a GPU and little else, in about seven minutes: the tests of clusters on devices,
# then loads on a model of Mistral 7B's shape with random weights, and leaves JSON. Needs no network, and installs into
# a folder that it removes.
#
#   tools/cuda_serve.sh                  on a GPU
#
# OUT      folder of what is left: logs, load-*.json (default: ./cuda_results)
# PYTHON   interpreter with torch and pip (default: python3)
# WHEELS   folder of wheels that the interpreter lacks, Ray among them (default: .whl)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

OUT=${OUT:-cuda_results} PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-.whl}
KERNELS_S=90 TESTS_S=200 READY_S=90 LOAD_S=60
SITE=$(mktemp -d)
serving=
trap '[ -z "$serving" ] || { kill -INT "$serving"; wait "$serving"; }; rm -rf "$SITE"' EXIT
mkdir -p "$OUT" || exit 1
"$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE/wheels" "$WHEELS"/*.whl || exit 1
export PYTHONPATH="$PWD:$SITE/wheels" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=120

timeout "$KERNELS_S" "$PYTHON" -m modeling.kernels >"$OUT/kernels.log" 2>&1 # for chains on the CPU
timeout "$TESTS_S" "$PYTHON" -W ignore -m pytest -c tests/cuda/bare.ini --rootdir=. -q --durations=5 \
    tests/system/ray_cluster/test_devices.py -k cuda 2>&1 | tee "$OUT/tests.log"
tests=$?

"$PYTHON" -m benchmarks.device.checkpoint "$SITE/model" || exit 1
"$PYTHON" -m deploy.cli serve --set model.name="$SITE/model" --set prefill.num_groups=0 --set generate.device=cuda \
    --set generate.num_slots=64 --set generate.max_slot_tokens=2048 --set http.port=-1 2>"$OUT/serve.log" &
serving=$!
for _ in $(seq "$READY_S"); do
    grep -q "^ready: " "$OUT/serve.log" && break
    kill -0 "$serving" 2>/dev/null || break
    sleep 1
done
loads=0
for users in 1 16 64; do
    timeout "$LOAD_S" "$PYTHON" -m deploy.cli bench --address 127.0.0.1:50051 --concurrency "$users" \
        --requests $((3 * users)) --prompt-tokens 1024 --output-tokens 128 --json "$OUT/load-$users.json" || loads=1
done
tail -n 20 "$OUT/serve.log"
[ "$tests" -eq 0 ] && [ "$loads" -eq 0 ]
