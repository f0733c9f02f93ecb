"""Benchmark of the interference of long prompts with running streams.

Eight streams run alone at first. Then prompts of 6,000 tokens arrive one after the other, and each requests one output
token. The main metric is the 99th percentile of the time between two tokens of a stream while prompts arrive, divided
by the same percentile while the streams run alone (baseline `idle`). The sides of the comparison are measured one after
another:

  disaggregated   a generation engine on its own core; the prefill rank, the orchestrator and this process on the other
                  cores
  streamed        like disaggregated, but KV is transferred over gRPC instead of shared memory (prefill.transfer)
  colocated       one engine with all cores, which prefills locally; generate.step_budget_s limits the prefill work
                  per step
  unbounded       like colocated, but with up to max_batched_tokens prompt tokens per step
  vllm, vllm_256  vLLM's CPU build with chunks of 2,048 tokens (its default) or of 256 (as in Baton). Needs
                  `--peer-python PATH`, the Python that `peers/setup_vllm_cpu.sh` installs, and `--peer-model DIR`

Output rows per side (`policy`): p99_ms and step_ms (the median time between two tokens), compared with `idle`; and
ttft_s of the long prompts, compared with `disaggregated`. Prompts that received no token in time are excluded from
ttft_s. `--plot FILE` draws the distributions of all gaps. With `--bars`, the benchmark fails if `disaggregated` is more
than 1.4 times `idle`.
"""

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import time_ns
from typing import Any, Protocol

from rich.console import Console

from baton.modeling.hosting import use_cores
from baton.planning.planner import ChainPlanner
from baton.process.clock import SystemClock
from benchmarks.plots.interference import draw
from benchmarks.sides.vllm_peer import VllmPeer
from benchmarks.support.arrivals import Arrival
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, peer_folder, progress, resolve
from benchmarks.support.local_config import local_config
from benchmarks.support.mixed_load import STREAM_TOKENS, Asked, ask, controlled, p99, streaming
from deploy.config.cluster import ClusterConfig
from deploy.groups.cluster import LocalCluster
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.planners import served_planner
from deploy.machine.resolved_model import ResolvedModel
from orchestrator.requests.config import OrchestratorConfig

BAR = 1.4
"""Maximum slowdown of the streams by prompts on the side `disaggregated`: 99th percentile of the time between tokens
while prompts arrive, divided by the same percentile while the streams run alone."""
_PEER_CHUNKS = {"vllm": 2048, "vllm_256": 256}
"""Maximum number of tokens per engine step of vLLM, by the name of the side."""
_PEER_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Sizes:
    """Numbers, lengths and durations that define the load."""

    num_streams: int
    num_tokens: int
    """Number of tokens of a long prompt."""
    every_s: float
    idle_s: float
    loaded_s: float
    num_rounds: int

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        """Arrivals of the long prompts. Arrival times are in seconds from the end of the initial period, in which only
        the streams run."""
        count = max(1, round(self.loaded_s / self.every_s))
        return tuple(Arrival(number * self.every_s, self.num_tokens, number) for number in range(count))


FULL = Sizes(8, 6000, 15.0, 10.0, 45.0, 3)
QUICK = Sizes(2, 600, 2.0, 2.0, 4.0, 1)


@dataclass(frozen=True)
class Felt:
    """Measurements of one side in one round: times between tokens of the streams without and with load, and times to
    first token of the prompts."""

    idle_ms: Sequence[float]
    loaded_ms: Sequence[float]
    ttft_s: Sequence[float]


class Side(Protocol):
    """One system in the comparison. It runs streams, and serves prompts that arrive in the meantime."""

    async def measure(self, sizes: Sizes) -> Felt:
        """Run one round and return its measurements."""
        ...


class RelaySide:
    """Side of the comparison that runs a local cluster of Baton, with the orchestrator in this process. During the
    measurement, this process is bound to `cores`; if the set is empty, it is not bound."""

    def __init__(self, cluster: LocalCluster, planner: ChainPlanner, cores: Sequence[int]) -> None:
        self._cluster = cluster
        self._planner = planner
        self._cores = cores

    async def measure(self, sizes: Sizes) -> Felt:
        """Run one round and return its measurements. Prompts that have received no token by the end of the round are
        excluded from the times to first token."""
        before = os.sched_getaffinity(0)
        if self._cores:
            use_cores(self._cores, 1)
        try:
            config = OrchestratorConfig(disaggregation="always")
            async with (
                controlled(self._cluster, self._planner, config) as scheduler,
                streaming(scheduler, sizes.num_streams) as gaps,
            ):
                start_ns = time_ns()
                await asyncio.sleep(sizes.idle_s)
                loaded_ns = time_ns()
                asking = [asyncio.create_task(ask(scheduler, each)) for each in sizes.arrivals]
                done, late = await asyncio.wait(asking, timeout=sizes.loaded_s)
                end_ns = time_ns()
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
                return Felt(
                    gaps.between_ms(start_ns, loaded_ns),
                    gaps.between_ms(loaded_ns, end_ns),
                    [_ttft_s(task) for task in done],
                )
        finally:
            use_cores(sorted(before), 1)


class PeerSide:
    """Side of the comparison that runs vLLM in a separate process."""

    def __init__(self, peer: VllmPeer) -> None:
        self._peer = peer

    async def measure(self, sizes: Sizes) -> Felt:
        """Run one round in the vLLM process, and return its measurements."""
        await asyncio.to_thread(self._peer.ask, {"rows": [STREAM_TOKENS] * sizes.num_streams})
        question = {
            "beside": [each.num_tokens for each in sizes.arrivals],
            "every_s": sizes.every_s,
            "idle_s": sizes.idle_s,
            "seconds": sizes.loaded_s,
        }
        answer: dict[str, Any] = await asyncio.to_thread(self._peer.ask, question)
        return Felt(answer["idle_ms"], answer["loaded_ms"], answer["ttft_s"])


def _ttft_s(task: "asyncio.Task[Asked]") -> float:
    return task.result().ttft_s


async def _relay(stack: AsyncExitStack, config: ClusterConfig, folder: Path, cores: Sequence[int]) -> RelaySide:
    cluster = await stack.enter_async_context(LocalCluster(ClusterPlan(config, ResolvedModel(folder)), SystemClock()))
    return RelaySide(cluster, await asyncio.to_thread(served_planner, cluster.plan), cores)


async def _sides(stack: AsyncExitStack, args: argparse.Namespace, sizes: Sizes) -> dict[str, Side]:
    """Start all sides, which are closed with the stack."""
    folder, cores = resolve(args), sorted(os.sched_getaffinity(0))
    first, *others = cores
    alone = {"num_ranks": 0, "num_threads": len(cores), "num_slots": sizes.num_streams + 4}
    chain = local_config(args.dtype, num_ranks=1, num_slots=sizes.num_streams + 4, cores=((first,),))
    ranks = replace(chain.prefill, num_threads=max(1, len(others)), cores=(tuple(others or cores),))
    relays: dict[str, tuple[ClusterConfig, Sequence[int]]] = {
        "disaggregated": (replace(chain, prefill=ranks), cores[1:]),
        "streamed": (replace(chain, prefill=replace(ranks, transfer="stream")), cores[1:]),
        "colocated": (local_config(args.dtype, **alone), ()),
        "unbounded": (local_config(args.dtype, **alone, step_budget_s=math.inf), ()),
    }
    if unknown := set(args.sides or ()) - relays.keys():
        raise SystemExit(f"--sides: {', '.join(sorted(unknown))} is unknown: use some of {', '.join(relays)}")
    sides: dict[str, Side] = {
        name: await _relay(stack, config, folder, own)
        for name, (config, own) in relays.items()
        if args.sides is None or name in args.sides
    }
    for name, chunk in _PEER_CHUNKS.items() if args.peer_python is not None else ():
        running = VllmPeer.running(
            args.peer_python,
            peer_folder(args),
            cores,
            _PEER_SETTINGS,
            options=("--batched-tokens", str(chunk)),
        )
        sides[name] = PeerSide(await asyncio.to_thread(stack.enter_context, running))
    return sides


def report(reporter: Reporter, bars: Bars, sizes: Sizes, found: dict[str, list[Felt]]) -> None:
    """For each side, report the streams' times between tokens while prompts arrive, compared with those while the
    streams run alone. Also report the prompts' times to first token, compared with the side `disaggregated`. Check the
    limit."""
    medians = {name: [_median(each.ttft_s) for each in rounds] for name, rounds in found.items()}
    for name, rounds in found.items():
        keys = case(tokens=sizes.num_tokens, streams=sizes.num_streams, policy=name, trace="steady")
        loaded = [p99(each.loaded_ms) for each in rounds]
        row = reporter.add(keys, "p99_ms", "ms", "idle", Pairs(loaded, [p99(each.idle_ms) for each in rounds]))
        steps = Pairs([_median(each.loaded_ms) for each in rounds], [_median(each.idle_ms) for each in rounds])
        reporter.add(keys, "step_ms", "ms", "idle", steps)
        if name == "disaggregated":
            bars.at_most("disaggregated, p99 between tokens over idle", 1 / row.ratio, BAR)
        elif "disaggregated" in medians:
            reporter.add(keys, "ttft_s", "s", "disaggregated", Pairs(medians[name], medians["disaggregated"]))


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


async def run(args: argparse.Namespace) -> int:
    """Measure all sides one after another, after a warm-up round. Return 0, or 1 if `--bars` is given and a value
    misses its limit."""
    sizes = QUICK if args.quick else FULL
    reporter, bars = Reporter("interference", args.json), Bars()
    found: dict[str, list[Felt]] = {}
    async with AsyncExitStack() as stack:
        sides = await _sides(stack, args, sizes)
        with progress("sides", (sizes.num_rounds + 1) * len(sides)) as advance:
            for number in range(sizes.num_rounds + 1):
                for name, side in sides.items():
                    felt = await side.measure(sizes if number else QUICK)
                    found.setdefault(name, []).extend([felt] if number else [])
                    advance()
    report(reporter, bars, sizes, found)
    reporter.close()
    if args.plot is not None:
        draw({name: [(each.idle_ms, each.loaded_ms) for each in rounds] for name, rounds in found.items()}, args.plot)
        Console(stderr=True).print(f"  plot: {args.plot}", markup=False)
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--peer-python", type=Path, default=None, help="Python of vLLM's environment")
    parser.add_argument("--peer-model", type=Path, default=None, help="Hugging Face folder for vLLM; default: Baton's")
    parser.add_argument(
        "--sides",
        type=lambda text: text.split(","),
        help="names of Baton's sides to measure, separated by commas (default: all)",
    )
    parser.add_argument("--plot", type=Path, default=None, help="PNG file of the gaps' distributions")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args()
    if args.bars and args.sides is not None and "disaggregated" not in args.sides:
        parser.error("--bars judges the side disaggregated: name it in --sides")
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(run(args))
    return 130


if __name__ == "__main__":
    sys.exit(main())
