"""Benchmark of the cost of KV in host memory, when a link must copy it to the device in each step.

Residency policies run on separate emulated devices (docs/devices.md), each with its own link of rate `--link`. The
device of policy `device` has memory for all KV. Two policies keep KV in host memory: `host` streams all of it to the
device in each step (after FlexGen), and `infinigen` fetches only the keys that the next layer selects. The device of
`infinigen` has memory for the weights and for the fraction `--room` of all KV.

All policies run the same sequences. Each sequence contains the beginning of a novel, and is fed the novel's next
tokens. The policies alternate. Each time, a policy runs one warm-up step and two measured steps. Output rows:
milliseconds of a step compared with `device` and with `host`, bytes over the link per step compared with `host`, and
the maximum number of bytes on the device compared with all KV. `--also` names additional policies, which run on devices
like that of `infinigen`. The table at the end, and `--plot`, show all policies and cases as in InfiniGen's figures 14
to 16: the step time, the speedup over `host`, and the time of a step of `device` divided by the time of a step of the
policy.

`--breakdown CASE` measures the parts of each policy's steps in one additional case (InfiniGen's figure 18): waiting for
transfers, the policy's own work, attention, linear layers, and the rest. For each policy, timed steps alternate with
untimed ones (`benchmarks.sides.timed_steps`).

With `--bars`, the benchmark fails unless all of these are true:

- a step of `infinigen` takes at most 1.6 times as long as one of `device`, and at most a third of one of `host`
- `infinigen` moves at most 15 % as many bytes over the link as `host`, and the link's own
  counters give the same number of bytes as the steps report
- at least 70 % of the fetch time of `infinigen` overlaps with computation
- the device never stores more than its memory limit
- in a breakdown, at most a tenth of a step is outside of all parts, and timing adds at most a tenth
"""

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.copying import LinkRate
from baton.modeling.hosting import use_cores
from baton.settings.byte_sizes import parse_rate
from benchmarks.plots.offload import draw
from benchmarks.sides.engine_rows import row_lengths
from benchmarks.sides.offloaded import STEPS_A_ROUND, LoadedSelection, Side, running
from benchmarks.sparse import contexts_of, find_source, text_ids
from benchmarks.support.harness import (
    PAIRS,
    QUICK_PAIRS,
    Bars,
    Pairs,
    Reporter,
    case,
    interleave,
    make_parser,
    progress,
    resolve,
)
from benchmarks.support.policy_table import IDEAL, STREAMED, CellTimes, policy_table
from benchmarks.support.step_parts import Breakdown, Part, PartClock, breakdown_table
from deploy.tuning.selection.passages import Context, prefill

GRID, QUICK_GRID = "16x4096", "2x512"
OTHER_BAR = 0.1
"""Maximum fraction of a timed step that is not attributed to any part of the step."""
TIMING_BAR = 1.1
"""Maximum ratio of the duration of a timed step to that of an untimed step."""
_READ = "emma.txt.gz"
_LATENCY_S = 1e-5


@dataclass(frozen=True)
class Cell:
    """One measured case: sequences of one batch size and length, and the memory limit of each policy's device."""

    batch: int
    context: int
    contexts: Sequence[Context]
    rooms: dict[str, int | None]
    """Device memory for KV in bytes, by policy. None: no limit."""
    rate: LinkRate

    def name(self, policy: str, **keys: object) -> str:
        """Return the name of this case for an output row of `policy`. `keys` are further key=value pairs, appended to
        the name."""
        return case(batch=self.batch, context=self.context, policy=policy, **keys)


class Bench:
    """Model and options that all cases share, and the measurements on them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, resolve(args)
        decoder = load_decoder(self.folder, dtype=args.dtype)
        self.source = LoadedSelection(decoder, prepared=find_source(decoder, self.folder, args.selection).load())
        self.num_pairs: int = args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
        self.limited = ("infinigen", *filter(None, args.also.split(",")))
        """Names of the policies whose devices have memory for only a fraction of all KV."""
        self.reporter, self.bars = Reporter("offload", args.json), Bars()

    def cell(self, sizes: str) -> Cell:
        """Return a case with prefilled sequences. `sizes` is BATCHxLENGTH, for example 16x4096."""
        decoder = self.source.decoder
        batch, context = map(int, sizes.split("x"))
        num_steps, lengths = (self.num_pairs + 1) * STEPS_A_ROUND, row_lengths(batch, context)
        token_ids = text_ids(self.folder, _READ, max(lengths) + num_steps + 1)
        contexts = contexts_of(token_ids, prefill(decoder, token_ids[: max(lengths)]), lengths, num_steps)
        room = int(self.args.room * sum(length + num_steps for length in lengths) * decoder.layout.token_bytes)
        rooms = {IDEAL: None, STREAMED: None} | dict.fromkeys(self.limited, room)
        return Cell(batch, context, contexts, rooms, LinkRate(self.args.link, _LATENCY_S))

    def compare(self, cell: Cell) -> CellTimes:
        """Measure the steps of all policies alternately on one case, report them, and check the benchmark's limits."""
        with contextlib.ExitStack() as opened:
            sides = {
                policy: opened.enter_context(running(policy, cell.contexts, self.source, cell.rate, room))
                for policy, room in cell.rooms.items()
            }
            for side in sides.values():
                side.step_ms()
            times: dict[str, list[float]] = {policy: [] for policy in sides}
            with progress(f"{cell.batch} x {cell.context}", self.num_pairs) as advance:
                for _ in range(self.num_pairs):
                    for policy, side in sides.items():
                        times[policy].append(side.step_ms())
                    advance()
            found = CellTimes(cell.batch, cell.context, times)
            self._report(cell, found, sides)
            self._check(cell, times, sides)
        return found

    def break_down(self, cell: Cell) -> list[Breakdown]:
        """Measure how long each part of a step takes, one policy after the other, and report the times."""
        found = []
        for policy, room in cell.rooms.items():
            each = self._break_down(cell, policy, room)
            for part, median_ms in each.medians_ms().items():
                if median_ms > 0:
                    pairs = Pairs([median_ms], [statistics.median(each.timed_ms)])
                    self.reporter.add(
                        cell.name(policy, part=part, dtype=self.args.dtype), "part_ms", "ms", "step", pairs
                    )
            what = f"{cell.batch} x {cell.context}, {policy}"
            self.bars.at_most(f"{what}: fraction of a step outside of all parts", each.other_share, OTHER_BAR)
            if policy != IDEAL:  # an untimed step of `device` is one native call
                self.bars.at_most(f"{what}: timed step over untimed step", each.times_plain, TIMING_BAR)
            found.append(each)
        return found

    def _break_down(self, cell: Cell, policy: str, room: int | None) -> Breakdown:
        parts: list[dict[Part, float]] = []
        args = policy, cell.contexts, self.source, cell.rate, room
        with running(*args, clock=PartClock()) as timed, running(*args) as plain:

            def timed_ms() -> float:
                step_ms = timed.step_ms()
                parts.append(dict(timed.parts_ms))
                return step_ms

            pairs = interleave(timed_ms, plain.step_ms, self.num_pairs)
        return Breakdown(policy, pairs.theirs, pairs.ours, parts[1:])

    def _report(self, cell: Cell, found: CellTimes, sides: dict[str, Side]) -> None:
        """Report the rows of a cell."""
        reporter, dtype = self.reporter, self.args.dtype
        reporter.add(cell.name(STREAMED, dtype=dtype), "step_ms", "ms", IDEAL, found.pairs(STREAMED, IDEAL))
        for policy in self.limited:
            name, side = cell.name(policy, dtype=dtype), sides[policy]
            for baseline in (IDEAL, STREAMED):
                reporter.add(name, "step_ms", "ms", baseline, found.pairs(policy, baseline))
            if side.step_bytes:
                streamed = Pairs([side.step_bytes], [sides[STREAMED].step_bytes])
                reporter.add(name, "link_bytes", "bytes", STREAMED, streamed)
            peaks = (each.device.memory_use.peak_bytes for each in (side, sides[IDEAL]))
            reporter.add(name, "peak_bytes", "bytes", IDEAL, Pairs(*([float(peak)] for peak in peaks)))

    def _check(self, cell: Cell, times: dict[str, list[float]], sides: dict[str, Side]) -> None:
        """Check the bars of `infinigen`."""
        ours, host, room = sides["infinigen"], sides[STREAMED], cell.rooms["infinigen"]
        assert room is not None, "a device with room for all KV would prove nothing"
        medians = {policy: statistics.median(found) for policy, found in times.items()}
        bars, where = self.bars, f"{cell.batch}x{cell.context}"
        bars.at_most(f"{where}: step, times that of device", medians["infinigen"] / medians[IDEAL], 1.6)
        bars.at_most(f"{where}: step, part of that of host", medians["infinigen"] / medians[STREAMED], 1 / 3)
        bars.at_most(f"{where}: bytes, part of those of host", ours.step_bytes / host.step_bytes, 0.15)
        bars.at_most(f"{where}: bytes that were not counted", abs(ours.step_bytes - ours.counted_bytes), 0)
        bars.at_least(f"{where}: hidden part of the fetches' time", ours.hidden, 0.7)
        bars.at_most(f"{where}: peak of the device, part of its room", ours.device.memory_use.peak_bytes / room, 1.0)


def run(args: argparse.Namespace) -> int:
    """Measure all cases. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    cores = sorted(os.sched_getaffinity(0))
    use_cores(cores, len(cores))
    bench = Bench(args)
    cells = [
        bench.compare(bench.cell(sizes)) for sizes in (args.grid or (QUICK_GRID if args.quick else GRID)).split(",")
    ]
    breakdowns = bench.break_down(bench.cell(args.breakdown)) if args.breakdown else []
    bench.reporter.close()
    console = Console(stderr=args.json)
    console.print(policy_table(cells))
    if breakdowns:
        console.print(breakdown_table(f"ms of a step, {args.breakdown}", breakdowns))
    if args.plot is not None:
        draw(cells, breakdowns, args.plot)
    return bench.bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--grid", default=None, help=f"batch x context cases (default {GRID})")
    parser.add_argument("--breakdown", default=None, help="batch x context of the steps whose parts are timed")
    parser.add_argument("--link", type=parse_rate, default="4GBps", help="rate in each direction (default: 4GBps)")
    parser.add_argument(
        "--room", type=float, default=0.3, help="fraction of all rows' KV that fits infinigen's device (default: 0.3)"
    )
    parser.add_argument("--also", default="", help="additional policies, for example window,h2o,int4,infinigen_int4")
    parser.add_argument("--selection", type=Path, default=None, help="file of `baton prepare`; default: the model's")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} with --quick")
    parser.add_argument("--plot", type=Path, default=None, help="file for a plot (PNG)")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
