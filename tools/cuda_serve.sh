#!/usr/bin/env bash
# Runs the server on a machine with a GPU and little else, in about seven minutes: the tests of clusters on devices,
# then loads on a model of Mistral 7B's shape with random weights, and leaves JSON. Needs no network, and installs into
# a folder that it removes.
#
#   tools/cuda_serve.sh                  on a GPU
#   DEVICE=emulated tools/cuda_serve.sh  on a CPU that stands for one, with one test and a tiny model: a test of this file
#
# OUT      folder of what is left: logs, load-*.json (default: ./cuda_results)
# TESTS_S  most seconds of the tests; 0: loads only
# PYTHON   interpreter with torch and pip (default: python3)
# WHEELS   folder of wheels that the interpreter lacks, Ray among them (default: .whl)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

DEVICE=${DEVICE:-cuda} OUT=${OUT:-cuda_results} PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-.whl}
KERNELS_S=90 TESTS_S=${TESTS_S:-200} READY_S=90 LOAD_S=60
SITE=$(mktemp -d)
serving=
trap '[ -z "$serving" ] || { kill -TERM "$serving"; wait "$serving"; }; rm -rf "$SITE"' EXIT
mkdir -p "$OUT" || exit 1
wheels=("$WHEELS"/*.whl)
if [ -e "${wheels[0]}" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$SITE/wheels" "${wheels[@]}" || exit 1
fi
export PYTHONPATH="$PWD:$SITE/wheels" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=120

which=cuda shape=() users_of_loads=(1 16 64) num_prompt=1024 num_output=128
if [ "$DEVICE" = emulated ]; then
    which="emulated and pool" shape=(--quick) users_of_loads=(2) num_prompt=128 num_output=8
fi
# for chains on the CPU: kernels are built in the tree
timeout "$KERNELS_S" sh -c '"$0" setup.py build_ext --inplace && "$0" -m baton.modeling.kernels' "$PYTHON" >"$OUT/kernels.log" 2>&1
tests=0
if [ "$TESTS_S" -gt 0 ]; then
    timeout "$TESTS_S" "$PYTHON" -W ignore -m pytest -c tests/cuda/bare.ini --rootdir=. -q --durations=5 \
        tests/system/ray_cluster/test_devices.py -k "$which" 2>&1 | tee "$OUT/tests.log"
    tests=$?
fi

"$PYTHON" -m benchmarks.device.checkpoint "$SITE/model" "${shape[@]}" || exit 1
settings=("model.name=$SITE/model" prefill.num_groups=0 "generate.device=$DEVICE" generate.num_slots=64)
settings+=(generate.max_slot_tokens=2048 orchestrator.port=0 http.port=-1)
"$PYTHON" -m deploy.cli serve "${settings[@]/#/--set=}" 2>"$OUT/serve.log" &
serving=$!
for _ in $(seq "$READY_S"); do
    grep -q "^ready: " "$OUT/serve.log" && break
    kill -0 "$serving" 2>/dev/null || break
    sleep 1
done
address=$(sed -n 's/^ready: clients may connect to \([^;]*\);.*/\1/p' "$OUT/serve.log")
[ -n "$address" ] || { tail -n 20 "$OUT/serve.log"; exit 1; }
loads=0
for users in "${users_of_loads[@]}"; do
    timeout "$LOAD_S" "$PYTHON" -m deploy.cli bench --address "$address" --concurrency "$users" \
        --requests $((3 * users)) --prompt-tokens "$num_prompt" --output-tokens "$num_output" \
        --json "$OUT/load-$users.json" || loads=1
done
tail -n 20 "$OUT/serve.log"
[ "$tests" -eq 0 ] && [ "$loads" -eq 0 ]
