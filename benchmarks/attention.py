"""Speed of prefill attention on one core: compares Baton's native kernel with torch's SDPA and with bf16 linear layers.

Uses one thread. Two cases are measured for each number of keys. In `causal`, there are as many queries as keys, and
only the visible query-key pairs are counted. In `dense`, there are `--queries` queries, and each attends to all keys.
The kernels are measured alternately. `matmul` is the rate (operations per second) of the linear layers of one model
layer over the same number of tokens: the rate that attention would have as a plain matrix product.
"""

import argparse
import os
import sys

from baton.modeling.hosting import use_cores
from benchmarks.support.harness import PAIRS, QUICK_PAIRS, Pairs, Reporter, case, make_parser, progress, resolve
from benchmarks.support.rates import KERNELS, runnable
from deploy.machine.prefill_rates import attention_work, layer_work, rate_of
from deploy.machine.resolved_model import ResolvedModel

KEYS = "512,1024,2048,3000,6000"
QUICK_KEYS = "512"
_CALL_S = 0.05
"""Minimum time in seconds for which each kernel is called repeatedly in each round."""


def run(args: argparse.Namespace) -> int:
    """Measure all kernels with each number of keys, and return 0. Kernels that cannot run on this machine are left out
    of the results."""
    shape, pairs = ResolvedModel(resolve(args)).shape(args.dtype), QUICK_PAIRS if args.quick else PAIRS
    use_cores(sorted(os.sched_getaffinity(0))[:1], 1)
    reporter, kernels = Reporter("attention", args.json), runnable(list(KERNELS))
    for num_keys in (int(number) for number in (args.keys or (QUICK_KEYS if args.quick else KEYS)).split(",")):
        for form, num_queries in (("causal", num_keys), ("dense", min(args.queries, num_keys - 1))):
            rates: dict[str, list[float]] = {name: [] for name in (*kernels, "matmul")}
            with progress(f"{num_keys} keys, {form}", pairs) as advance:
                for _ in range(pairs):
                    for name in kernels:
                        rate = rate_of(attention_work(KERNELS[name], shape, (num_queries, num_keys)), _CALL_S)
                        rates[name].append(rate / 1e9)
                    rates["matmul"].append(rate_of(layer_work(shape, num_queries), _CALL_S) / 1e9)
                    advance()
            ours = kernels[0]
            for baseline in rates:
                if baseline != ours:
                    name = case(tokens=num_queries, context=num_keys, kernel=ours, policy=form, threads=1)
                    reporter.add(name, "gflops", "GFLOP/s", baseline, Pairs(rates[ours], rates[baseline]))
    reporter.close()
    return 0


def main() -> int:
    """Run the benchmark from the command line. Return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--keys", default=None, help=f"numbers of keys (default {KEYS})")
    parser.add_argument("--queries", type=int, default=512, help="number of queries of dense cases")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
