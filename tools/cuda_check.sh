#!/usr/bin/env bash
# Runs the tests and the benchmark for GPUs on a machine with a GPU and little else, in less than nine minutes, and
# leaves JSON. Needs no network, installs nothing, and writes to $OUT and the cache folders of Baton and Triton alone.
#
#   tools/cuda_check.sh                  on a GPU
#   DEVICE=emulated tools/cuda_check.sh  on a CPU that stands for one, in the benchmark's quick form: a test of this file
#
# OUT      folder of what is left: tests.json, measured.json, summary.json and logs (default: ./cuda_results)
# PYTHON   interpreter with torch, Triton and pytest (default: python3)
# WHEELS   folder of wheels that the interpreter lacks, which are unpacked, not installed (default: .whl)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

DEVICE=${DEVICE:-cuda} OUT=${OUT:-cuda_results} PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-.whl}
KERNELS_S=60 TESTS_S=270 BENCHMARKS_S=190
SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
mkdir -p "$OUT" || exit 1
for wheel in "$WHEELS"/*.whl; do
    [ -e "$wheel" ] && { "$PYTHON" -m zipfile -e "$wheel" "$SITE" || exit 1; }
done
export PYTHONPATH="$PWD:$SITE" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 BATON_TEST_DEVICE=$DEVICE
export BATON_TEST_JSON=$OUT/tests.json

"$PYTHON" tools/cuda_machine.py "$DEVICE" || exit 1

workers=() bars=(--bars)
if [ "$DEVICE" = cuda ]; then
    # Triton's compiler takes most of the tests' time: most of the cores have a process, whose torch has one thread
    "$PYTHON" -c 'import xdist' 2>"$OUT/xdist.log" && workers=(-n "$(($(nproc) * 3 / 4))" --dist worksteal)
else
    bars=(--quick)
    export OMP_NUM_THREADS=1
fi

# the CPU's side of comparisons, in parallel: kernels are built in the tree
timeout "$KERNELS_S" sh -c '"$0" setup.py build_ext --inplace && "$0" -m modeling.kernels' "$PYTHON" >"$OUT/kernels.log" 2>&1
kernels=$?
rm -f "$BATON_TEST_JSON"
OMP_NUM_THREADS=1 timeout "$TESTS_S" "$PYTHON" -W ignore -m pytest -c tests/cuda/bare.ini --rootdir=. "${workers[@]}" \
    tests/cuda tests/conformance/test_devices.py 2>&1 | tee "$OUT/tests.log"
tests=$?
[ "$DEVICE" = cuda ] || export TRITON_INTERPRET=1
timeout "$BENCHMARKS_S" "$PYTHON" -m benchmarks.cuda --device "$DEVICE" "${bars[@]}" --json \
    2>"$OUT/measured.log" | tee "$OUT/measured.json"
benchmarks=$?
tail -n 40 "$OUT/measured.log"

"$PYTHON" tools/cuda_machine.py "$DEVICE" "kernels=$kernels" "tests=$tests" "benchmarks=$benchmarks" |
    tee "$OUT/summary.json"
[ "$tests" -eq 0 ] && [ "$benchmarks" -eq 0 ]
