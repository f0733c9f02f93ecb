#!/usr/bin/env bash
# Tests and measures Baton on a machine with a GPU and little else, in 14 minutes at most, and leaves JSON. Needs no
# network, installs nothing but what the part `serve` needs, and writes to $OUT and the cache folders of Baton and
# Triton alone. Each part has a time limit of its own and leaves its results as they come.
#
#   tools/cuda_measure.sh                  on a GPU: all parts, the most important first
#   tools/cuda_measure.sh tests served     these parts
#   DEVICE=emulated tools/cuda_measure.sh  on a CPU that stands for one, in quick forms: a test of this file
#
# Parts:
#   tests      tests/cuda, on most of the cores
#   overheads, kernels, served, steps, prefill, offload, chain   those of `python -m benchmarks.cuda --help`
#   serve      `baton serve` under loads of `baton bench`, by tools/cuda_serve.sh without its tests
#
# OUT      folder of what is left: tests.json, PART.json, PART.log, steps-*.jsonl, trace-*.json.gz and summary.json
#          (default: ./cuda_results)
# PYTHON   interpreter with torch, Triton and pytest (default: python3)
# WHEELS   folder of wheels that the interpreter lacks, which are unpacked, not installed (default: .whl). Where the
#          interpreter has torch, Triton and transformers, those of `python tools/cuda_wheels.py .whl`, run on a machine
#          with pip and a package registry, are what else is needed: 57 MiB, Ray among them. Do not pack Ray's wheel
#          with `python -m zipfile`, which forgets that its files are executable
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

DEVICE=${DEVICE:-cuda} OUT=${OUT:-cuda_results} PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-.whl}
declare -A LIMIT_S=([tests]=120 [overheads]=30 [kernels]=80 [served]=240 [steps]=50 [prefill]=40 [offload]=60 [chain]=90 [serve]=150)
PARTS=("$@")
[ $# -gt 0 ] || PARTS=(tests overheads kernels served steps prefill serve offload chain)
SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
mkdir -p "$OUT" || exit 1
for wheel in "$WHEELS"/*.whl; do
    case $wheel in */ray-*) continue ;; esac # the part `serve` installs it
    [ -e "$wheel" ] && { "$PYTHON" -m zipfile -e "$wheel" "$SITE" || exit 1; }
done
export PYTHONPATH="$PWD:$SITE" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 BATON_TEST_DEVICE=$DEVICE COLUMNS=160
export BATON_TEST_JSON=$OUT/tests.json

"$PYTHON" tools/cuda_machine.py "$DEVICE" "$WHEELS" "${PARTS[@]}" || exit 1

workers=() options=(--device "$DEVICE" --json)
if [ "$DEVICE" = cuda ]; then
    # Triton's compiler takes most of the tests' time: most of the cores have a process, whose torch has one thread
    "$PYTHON" -c 'import xdist' 2>"$OUT/xdist.log" && workers=(-n "$(($(nproc) * 3 / 4))" --dist worksteal)
else
    options+=(--quick)
    export OMP_NUM_THREADS=1
fi

run_part() {
    local limit_s=${LIMIT_S[$1]}
    case $1 in
    tests)
        # the CPU's side of comparisons, in parallel: kernels are built in the tree
        timeout 60 sh -c '"$0" setup.py build_ext --inplace && "$0" -m baton.modeling.kernels' "$PYTHON" >"$OUT/build.log" 2>&1
        rm -f "$BATON_TEST_JSON"
        OMP_NUM_THREADS=1 timeout "$limit_s" "$PYTHON" -W ignore -m pytest -c tests/cuda/bare.ini --rootdir=. \
            "${workers[@]}" tests/cuda tests/conformance/test_devices.py >"$OUT/tests.log" 2>&1
        ;;
    serve) TESTS_S=0 timeout "$limit_s" tools/cuda_serve.sh >"$OUT/serve-loads.log" 2>&1 ;;
    *)
        (
            [ "$DEVICE" = cuda ] || export TRITON_INTERPRET=1
            timeout "$limit_s" "$PYTHON" -m benchmarks.cuda "${options[@]}" --parts "$1" --log "$OUT" \
                >"$OUT/$1.json" 2>"$OUT/$1.log"
        )
        ;;
    esac
}

statuses=()
for part in "${PARTS[@]}"; do
    began_s=$SECONDS
    run_part "$part"
    statuses+=("$part=$?")
    echo "${statuses[-1]} after $((SECONDS - began_s)) s"
    case ${statuses[-1]} in *=0) ;; *) tail -n 20 "$OUT/$part.log" "$OUT/serve-loads.log" 2>/dev/null ;; esac
done
"$PYTHON" -m tools.cuda_table "$OUT"
"$PYTHON" tools/cuda_machine.py "$DEVICE" "${statuses[@]}" | tee "$OUT/summary.json"
for status in "${statuses[@]}"; do
    case $status in *=0) ;; *) exit 1 ;; esac
done
