"""Benchmark of the overhead of serving: compares streams through the whole stack with the bare engine, and with a
cluster without prefill ranks.

The whole stack is a client, an orchestrator, a prefill chain on Ray, and a generation group, connected by gRPC. There
are two baselines:

- `engine`: the generation engine in a separate process, called directly
- `single`: a served cluster whose generation group prefills (`prefill.num_groups=0`)

All run at the same time and are measured alternately, with the same prompts, batch sizes, threads and pinned cores. The
client measures the time to first token. Tokens per second are measured while all streams generate. At the end, the time
to first token is split into its stages while nothing else runs. With `--bars`, only the cases that have bars are
measured, and the benchmark fails if a value misses its limit.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

import torch
from rich.console import Console

from baton.client import AsyncClient
from baton.modeling.hosting import use_cores
from baton_lab.served_child import own_cluster, until_signal
from benchmarks.sides.engine import EngineSpec, engine_alone
from benchmarks.sides.served import ServedSide
from benchmarks.support.harness import PAIRS, QUICK_PAIRS, Bars, Pairs, Reporter, case, make_parser, progress, resolve
from benchmarks.support.streams import Measured, Side, make_load
from generate_workers.config import EngineConfig

STREAMS = "1,4,16"
QUICK_STREAMS = "4"
SPAN_TOKENS = 512
SPAN_REQUESTS = 20
QUICK_SPAN_REQUESTS = 5
BAR_STREAMS = 16
OWN_THREAD_BAR = 0.90
"""Minimum ratio of the served cluster's tokens per second to those of the bare engine, with BAR_STREAMS streams.
Applies if the engine has a core of its own."""
ALL_THREADS_BAR = 0.75
"""Minimum ratio of the served cluster's tokens per second to those of the bare engine, with BAR_STREAMS streams.
Applies if the engine uses all cores and shares them with all other processes."""
OVERHEAD_BAR_MS = 60.0
"""Maximum overhead of serving in milliseconds, for a request with 512 prompt tokens: the median of the part of the time
to first token that is not spent in the prefill chain."""
_METRICS = (("ttft_s", "s"), ("step_ms", "ms"), ("tokens_s", "tokens/s"))


@dataclass(frozen=True)
class Place:
    """Number of threads and pinned cores of the generation engine. The same values are used on all sides of the
    comparison."""

    num_threads: int
    cores: tuple[int, ...] = ()
    """Cores that the engine is pinned to. Empty: not pinned."""
    other_cores: tuple[int, ...] = ()
    """Cores that all other processes are pinned to. Empty: not pinned."""

    @classmethod
    def pinned(cls, num_threads: int, cores: Collection[int]) -> Self:
        """Return a Place that pins the engine to the first `num_threads` of the sorted `cores`, and all other processes
        to the remaining cores. If no cores remain, the other processes share the engine's cores."""
        mine, others = tuple(sorted(cores)[:num_threads]), tuple(sorted(cores)[num_threads:])
        return cls(num_threads, mine, others or mine)

    def settings(self, num_ranks: int) -> list[str]:
        """Return the arguments of `baton serve --set` for these threads and cores, with a prefill chain of `num_ranks`
        ranks. If `num_ranks` is 0, the cluster has no prefill groups."""
        chain = [f"prefill.num_ranks={num_ranks}", "orchestrator.disaggregation=always"]
        settings = chain if num_ranks else ["prefill.num_groups=0"]
        settings += [f"generate.num_threads={self.num_threads}", "generate.speculation=off"]  # as in the bare engine
        if self.cores:
            others = list(self.other_cores)
            settings += [f"generate.cores={[list(self.cores)]}", f"orchestrator.cores={others}"]
            settings += [f"prefill.cores={[others] * num_ranks}"] if num_ranks else []
        return settings


class _Bench:
    """Starts the cluster and its baselines, and measures them alternately."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = resolve(args)
        self.reporter = Reporter("serve", args.json)
        self.console = Console(stderr=True, highlight=False)
        self.pairs = QUICK_PAIRS if args.quick else PAIRS

    @contextlib.asynccontextmanager
    async def sides(self, place: Place, with_single: bool) -> AsyncIterator[tuple[ServedSide, dict[str, Side]]]:
        """Context manager. Start the whole stack and its baselines. Yield the stack, and the baselines by name. All are
        ended on exit."""
        async with AsyncExitStack() as stack:
            chain, ray_address = await self._served(stack, place.settings(self.args.ranks))
            baselines: dict[str, Side] = {}
            if with_single:  # on the same Ray, because a second one would use part of the cores
                settings = [*place.settings(0), f"ray.address={ray_address}"]
                baselines["single"], _ = await self._served(stack, settings)
            spec = EngineSpec(
                self.folder, self.args.dtype, place.num_threads, place.cores, EngineConfig(speculation="off")
            )
            baselines["engine"] = await stack.enter_async_context(engine_alone(spec))
            stack.enter_context(_pinned_to(place.other_cores))
            yield chain, baselines

    async def _served(self, stack: AsyncExitStack, settings: Sequence[str]) -> tuple[ServedSide, str]:
        """Start a cluster; return its side, and the address of its Ray."""
        model = (f"model.name={self.folder}", f"model.dtype={self.args.dtype}", "prefill.prefix_share=0")
        options = [part for each in (*model, *settings) for part in ("--set", each)]
        cluster = await stack.enter_async_context(own_cluster("serve-bench", options, self.say))
        return ServedSide(await stack.enter_async_context(AsyncClient(cluster.target))), cluster.ray_address

    async def compare(self, place: Place, num_streams: int, chain: Side, baselines: Mapping[str, Side]) -> float:
        """Measure `num_streams` streams on the whole stack (`chain`) and on each of the baselines, and report the
        results. Return the tokens per second of the whole stack, divided by those of the baseline `engine`."""
        args, found = self.args, {name: list[Measured]() for name in ("chain", *baselines)}
        with progress(f"{num_streams} streams", self.pairs + 1) as advance:
            for index in range(self.pairs + 1):
                load = make_load(num_streams, args.tokens, args.max_tokens, seed=index)
                for name, side in {"chain": chain, **baselines}.items():
                    found[name].append(await side.measure(load))
                advance()
        keys = {"tokens": args.tokens, "streams": num_streams, "ranks": args.ranks, "dtype": args.dtype}
        name = case(**keys, threads=place.num_threads, policy="pinned" if place.cores else "shared")
        ratio = 0.0
        for baseline in baselines:
            for metric, unit in _METRICS:
                ours, theirs = ([getattr(each, metric) for each in found[side][1:]] for side in ("chain", baseline))
                row = self.reporter.add(name, metric, unit, baseline, Pairs(ours, theirs))
                ratio = row.ratio if (metric, baseline) == ("tokens_s", "engine") else ratio
        return ratio

    async def spans(self, chain: ServedSide) -> float:
        """Measure and report the stages of the time to first token. Return the median of the milliseconds that a
        request spends outside the prefill chain."""
        num_requests = QUICK_SPAN_REQUESTS if self.args.quick else SPAN_REQUESTS
        found = []
        with progress("spans", num_requests + 1) as advance:
            for index in range(num_requests + 1):
                (prompt,) = make_load(1, SPAN_TOKENS, 1, seed=index).prompts
                found.append(await chain.spans(prompt))
                advance()
        found = found[1:]
        medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
        self.say("spans, medians: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in medians.items()))
        overheads = [sum(each.values()) - each["chain"] for each in found]
        name = case(tokens=SPAN_TOKENS, streams=1, ranks=self.args.ranks, dtype=self.args.dtype)
        pairs = Pairs(overheads, [each["chain"] for each in found])
        return self.reporter.add(name, "overhead_ms", "ms", "chain", pairs).value

    def say(self, line: str) -> None:
        """Print a line that is not an output row."""
        self.console.print(f"  {line}", markup=False)


async def measure(args: argparse.Namespace) -> int:
    """Compare the whole stack with both baselines for every number of streams. Then measure the stages of the time to
    first token. Return 0."""
    bench = _Bench(args)
    place = Place.pinned(args.threads, _all_cores()) if args.pin else Place(args.threads)
    async with bench.sides(place, with_single=True) as (chain, baselines):
        for num_streams in _numbers(args.streams or (QUICK_STREAMS if args.quick else STREAMS)):
            await bench.compare(place, num_streams, chain, baselines)
        await bench.spans(chain)
    bench.reporter.close()
    return 0


async def check_bars(args: argparse.Namespace) -> int:
    """Measure only the cases that have limits (bars). Return 0, or 1 if a value misses its limit."""
    bench, bars = _Bench(args), Bars()
    for place, bar in ((Place.pinned(1, _all_cores()), OWN_THREAD_BAR), (Place(2), ALL_THREADS_BAR)):
        async with bench.sides(place, with_single=False) as (chain, baselines):
            if place.cores:
                bars.at_most("milliseconds outside the chain", await bench.spans(chain), OVERHEAD_BAR_MS)
            ratio = await bench.compare(place, BAR_STREAMS, chain, baselines)
            bars.at_least(f"of the engine's tokens/s, {place.num_threads} threads", ratio, bar)
    bench.reporter.close()
    return bars.close()


def _all_cores() -> set[int]:
    return set(os.sched_getaffinity(0))


@contextlib.contextmanager
def _pinned_to(cores: Collection[int]) -> Iterator[None]:
    """Pin this process, which is the client, to `cores` for the block; empty: do not pin it."""
    before = _all_cores()
    if cores:
        use_cores(sorted(cores), torch.get_num_threads())
    try:
        yield
    finally:
        use_cores(sorted(before), torch.get_num_threads())


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--streams", default=None, help=f"numbers of concurrent streams (default {STREAMS})")
    parser.add_argument("--tokens", type=int, default=128, help="number of tokens of each prompt")
    parser.add_argument("--max-tokens", type=int, default=96, help="number of output tokens of each stream")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks of the chain")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="number of torch threads of the engine"
    )
    parser.add_argument(
        "--pin", action="store_true", help="pin the engine to its own cores, and everything else to the others"
    )
    parser.add_argument("--bars", action="store_true", help="measure only the cases that have bars")
    args = parser.parse_args()
    return asyncio.run(until_signal(check_bars(args) if args.bars else measure(args)))


if __name__ == "__main__":
    sys.exit(main())
