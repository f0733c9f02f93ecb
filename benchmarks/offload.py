"""What does KV in home memory cost, across a link that has to bring it?

Policies on emulated devices (docs/devices.md), each with a link of `--link` of its own: `device`, which has room for
all KV, and two whose KV lies at home: `host`, which streams all of it in each step (after FlexGen), and `infinigen`,
which fetches what the next layer picks, on a device with room for `--room` of all KV besides the weights. The same
rows, which have read a novel, get the tokens that truly come next. Measured in turn, two steps at a time after one that
is not counted. Rows: milliseconds of a step beside `device` and beside `host`, bytes over the link in a step beside
`host`'s, and the most bytes that the device held, beside all KV. `--also` names further policies, which are measured on
devices like that of `infinigen`.

`--bars`: a step of `infinigen` takes at most 1.6 times that of `device` and a third of that of `host`; its bytes are at
most 15 % of `host`'s, and those that its steps counted; at least 70 % of its fetches' time is hidden; and the device
never holds more than its room.
"""

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton.settings.byte_sizes import parse_rate
from benchmarks.sides.engine_rows import row_lengths
from benchmarks.sparse import contexts_of, find_source, text_ids
from benchmarks.support.harness import PAIRS, QUICK_PAIRS, Bars, Pairs, Reporter, case, make_parser, resolve
from deploy.quality.passages import Context, PassageRows, prefill, shape_for
from generate_workers.residency.policies import SelectionSource, make_residency
from modeling.checkpoints.weights import load_decoder
from modeling.device.copying import LinkRate
from modeling.device.emulated import EmulatedDevice
from modeling.forward.decoder import Decoder
from modeling.hosting import use_cores

GRID, QUICK_GRID = "16x4096", "2x512"
_STEPS = 2
_READ = "emma.txt.gz"
_LATENCY_S = 1e-5


class Side:
    """Rows of one policy on a device of its own."""

    def __init__(self, rows: PassageRows, device: EmulatedDevice) -> None:
        self._rows, self.device = rows, device
        self.step_bytes = self.counted_bytes = 0.0
        """Bytes over the link in a step, as the link counted and as the steps did."""
        self.hidden = 1.0
        """Part of the fetches' time for which no step waited."""

    def step_ms(self) -> float:
        """Return the mean milliseconds of a few steps, after one that is not counted."""
        self._rows.step()
        link = self.device.link
        bytes_before = link.num_bytes_fetched + link.num_bytes_stored
        fetch_s, waited_s = link.fetch_s, link.waited_s
        scores = [self._rows.step() for _ in range(_STEPS)]
        self.step_bytes = (link.num_bytes_fetched + link.num_bytes_stored - bytes_before) / _STEPS
        self.counted_bytes = statistics.fmean(score.num_link_bytes for score in scores)
        if link.fetch_s > fetch_s:
            self.hidden = 1.0 - (link.waited_s - waited_s) / (link.fetch_s - fetch_s)
        return statistics.fmean(score.duration_s for score in scores) * 1e3


@contextlib.contextmanager
def running(
    policy: str, contexts: Sequence[Context], source: SelectionSource, rate: LinkRate, room: int | None
) -> Iterator[Side]:
    """Open rows of a policy on a device with `room` bytes for KV; close them afterwards."""
    cpu, device = source.decoder, EmulatedDevice(rate)
    decoder = Decoder(cpu.config, cpu.weights, device=device)
    shape = shape_for(decoder, [context.passage for context in contexts])
    there = replace(source, decoder=decoder, device_bytes=room)
    with contextlib.closing(make_residency(policy, shape, device, there)) as residency:
        device.bound(room)
        with PassageRows.opened(decoder, residency, contexts) as rows:
            yield Side(rows, device)
    device.link.rest()


def measure(args: argparse.Namespace, cell: str, source: SelectionSource, reporter: Reporter, bars: Bars) -> None:
    """Measure one cell of the grid."""
    cpu = source.decoder
    batch, context = map(int, cell.split("x"))
    num_pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
    num_steps, lengths = (num_pairs + 1) * (_STEPS + 1), row_lengths(batch, context)
    token_ids = text_ids(resolve(args), _READ, max(lengths) + num_steps + 1)
    contexts = contexts_of(token_ids, prefill(cpu, token_ids[: max(lengths)]), lengths, num_steps)
    room = int(args.room * sum(length + num_steps for length in lengths) * cpu.layout.token_bytes)
    rate, limited = LinkRate(args.link, _LATENCY_S), ("infinigen", *filter(None, args.also.split(",")))
    with contextlib.ExitStack() as opened:
        sides = {
            policy: opened.enter_context(running(policy, contexts, source, rate, limit))
            for policy, limit in (("device", None), ("host", None), *((policy, room) for policy in limited))
        }
        for side in sides.values():
            side.step_ms()
        times: dict[str, list[float]] = {policy: [] for policy in sides}
        for _ in range(num_pairs):
            for policy, side in sides.items():
                times[policy].append(side.step_ms())
        ours, host = sides["infinigen"], sides["host"]
        for policy in limited:
            name, side = case(batch=batch, context=context, policy=policy, dtype=args.dtype), sides[policy]
            for baseline in ("device", "host"):
                reporter.add(name, "step_ms", "ms", baseline, Pairs(times[policy], times[baseline]))
            if side.step_bytes:
                reporter.add(name, "link_bytes", "bytes", "host", Pairs([side.step_bytes], [host.step_bytes]))
            peaks = side.device.memory_use.peak_bytes, sides["device"].device.memory_use.peak_bytes
            reporter.add(name, "peak_bytes", "bytes", "device", Pairs(*([float(peak)] for peak in peaks)))
        medians = {policy: statistics.median(found) for policy, found in times.items()}
        bars.at_most(f"{cell}: step, times that of device", medians["infinigen"] / medians["device"], 1.6)
        bars.at_most(f"{cell}: step, part of that of host", medians["infinigen"] / medians["host"], 1 / 3)
        bars.at_most(f"{cell}: bytes, part of those of host", ours.step_bytes / host.step_bytes, 0.15)
        bars.at_most(f"{cell}: bytes that were not counted", abs(ours.step_bytes - ours.counted_bytes), 0)
        bars.at_least(f"{cell}: hidden part of the fetches' time", ours.hidden, 0.7)
        bars.at_most(f"{cell}: peak of the device, part of its room", ours.device.memory_use.peak_bytes / room, 1.0)


def run(args: argparse.Namespace) -> int:
    """Measure all cells; with --bars, return 1 when a bar is missed."""
    cores = sorted(os.sched_getaffinity(0))
    use_cores(cores, len(cores))
    folder = resolve(args)
    cpu = load_decoder(folder, dtype=args.dtype)
    source = find_source(cpu, folder, None)
    reporter, bars = Reporter("offload", args.json), Bars()
    for cell in (args.grid or (QUICK_GRID if args.quick else GRID)).split(","):
        measure(args, cell, source, reporter, bars)
    reporter.close()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--grid", default=None, help=f"batch x context cases (default {GRID})")
    parser.add_argument("--link", type=parse_rate, default="4GBps", help="rate in each direction (default: 4GBps)")
    parser.add_argument("--room", type=float, default=0.3, help="of all rows' KV, on infinigen's device (default: 0.3)")
    parser.add_argument("--also", default="", help="further policies, like window,h2o,int4,infinigen_int4")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when the promised does not hold")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
