"""Benchmark of KV in host memory: measures the added time per step, and how many more sequences fit.

Compares the policies `host` and `device` (`generate_workers.residency`) in the same engine, on the same sequences with
different lengths. The policies alternate. Each time, a policy runs one warm-up step and two measured steps. The
baseline `formula` is the number of bytes that `host` must move over the link in a step: all cached KV to the device,
and the KV of each sequence's new token back to the host.

When steps are measured, the policy `host` runs on a device with `--device-gib` GiB for weights and KV, and the policy
`device` runs without a limit. The limit is also enforced on a CPU. Afterwards, a separate check runs the case that
`--limited` names with both policies under the limit: all sequences must fit with `host`, and some must be refused with
`device`. On a CPU, the rate of the link is the memory bandwidth, and the link's thread runs in addition to the compute
threads.

If `--bars` is given, the benchmark fails if the separate check fails, or if the bytes moved differ from the formula.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.hosting import use_cores
from benchmarks.sides.engine_rows import EngineRows, num_rows_that_fit, row_lengths
from benchmarks.support.harness import PAIRS, QUICK_PAIRS, Bars, Pairs, Reporter, case, interleave, make_parser, resolve
from generate_workers.config import EngineConfig

GRID = "1x4096,8x1024,8x7500"
QUICK_GRID = "2x512"
_STEPS = 2
GIB = 2**30


def link_bytes(token_bytes: int, lengths: Sequence[int]) -> int:
    """Return the number of bytes that a step of policy `host` moves over the link, in both directions together.
    `lengths` are the numbers of tokens of the sequences, including the new token."""
    return token_bytes * sum(lengths)


def compare(
    decoder: Decoder, folder: Path, lengths: list[int], num_pairs: int, device_bytes: int = 0
) -> tuple[Pairs, int, int]:
    """Measure steps with the residency policies `host` and `device` alternately. `device_bytes`: limit of the device
    memory with policy `host`; 0: no limit. Return three values: the milliseconds per step as Pairs of (`host`,
    `device`), the bytes that the last step with `host` moved over the link, and the bytes that `link_bytes` predicts
    for this step."""
    num_steps = (num_pairs + 1) * (_STEPS + 1)
    slot_tokens = max(lengths) + num_steps + 2

    unlimited = EngineConfig(num_slots=len(lengths), max_slot_tokens=slot_tokens)
    limited = replace(unlimited, residency="host", device_memory_bytes=device_bytes)
    with (
        EngineRows.running(decoder, folder, lengths, num_steps + 1, limited) as host,
        EngineRows.running(decoder, folder, lengths, num_steps + 1, unlimited) as device,
    ):
        pairs = interleave(lambda: host.step_ms(_STEPS), lambda: device.step_ms(_STEPS), num_pairs)
        after = [length + num_steps for length in lengths]
        return pairs, host.last.num_link_bytes, link_bytes(decoder.layout.token_bytes, after)


def check_limit(decoder: Decoder, batch: int, context: int, device_bytes: int, bars: Bars) -> None:
    """Check two limits of a device with `device_bytes` bytes of memory. With the residency policy `host`, `batch`
    sequences of `context` tokens must fit. With the policy `device`, fewer than `batch` must fit."""
    console = Console(stderr=True, highlight=False)
    for policy in ("host", "device"):
        config = EngineConfig(
            num_slots=batch, max_slot_tokens=context + 1, residency=policy, device_memory_bytes=device_bytes
        )
        num_rows, reason = num_rows_that_fit(decoder, context, config)
        what = f"rows of {context} tokens that {policy} holds, device limited to {device_bytes / GIB:g} GiB"
        if policy == "host":
            bars.at_least(what, num_rows, batch)
        else:
            bars.at_most(what, num_rows, batch - 1)
            console.print(f"  device says: {reason or 'nothing'}", soft_wrap=True, markup=False)


def run(args: argparse.Namespace) -> int:
    """Measure all cases. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[: args.threads or len(cores)]
    use_cores(cores, len(cores))
    folder, num_pairs = resolve(args), args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
    decoder = load_decoder(folder, dtype=args.dtype)
    reporter, bars, device_bytes = Reporter("residency", args.json), Bars(), int(args.device_gib * GIB)
    for cell in (args.grid or (QUICK_GRID if args.quick else GRID)).split(","):
        batch, context = map(int, cell.split("x"))
        name = case(batch=batch, context=context, policy="host", dtype=args.dtype, threads=len(cores))
        pairs, moved, expected = compare(decoder, folder, row_lengths(batch, context), num_pairs, device_bytes)
        reporter.add(name, "step_ms", "ms", "device", pairs)
        reporter.add(name, "kv_bytes", "bytes", "formula", Pairs([float(moved)], [float(expected)]))
        bars.at_most(f"{cell}, bytes over the link that differ from the formula", abs(moved - expected), 0)
    batch, context = map(int, args.limited.split("x"))
    check_limit(decoder, batch, context, device_bytes, bars)
    reporter.close()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--grid", default=None, help=f"batch x context cases (default {GRID})")
    parser.add_argument("--threads", type=int, default=0, help="number of compute threads, one core each; 0: all cores")
    parser.add_argument("--limited", default="8x7500", help="batch x context for the limited device")
    parser.add_argument(
        "--device-gib", type=float, default=1.0, help="size of the limited device's memory for weights and KV, in GiB"
    )
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
