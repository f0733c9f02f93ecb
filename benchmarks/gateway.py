"""Benchmark of the number of streams that one orchestrator can serve, and of the cost of each forwarded token.

The server is the orchestrator of a real cluster, with gRPC to clients and groups. Generation groups emit scripted
tokens at a given pace without computing (`benchmarks.gateways.engines`). Clients check each token
(`benchmarks.gateways.load`). Clients, server and engines each run in their own process. Prompts are text, which the
server tokenizes; nothing is prefilled.

- `trace=paced`: all streams run at once, each at a few tokens per second, so that the processor suffices for clients,
  server and engines. While all streams run, the benchmark measures the tokens forwarded per second, the server's
  processor time per token in microseconds, and the p99 of the time from the engine to the client. The baseline `made`
  is the number of tokens per second that the groups should emit. The server's memory per stream is measured too. It is
  the growth of the server's memory since a first, smaller run (a tenth of the streams), divided by the number of
  streams. The smaller run makes all one-time allocations.
- `trace=flood`: fewer streams, whose tokens are emitted faster than they can be forwarded.
- `trace=burst`: short requests at random times within a few seconds. The benchmark measures the p99 of the time to
  first token, and the server's processor time per request.

A value without another baseline is compared with its limit (`promised`). A missing or misplaced token, a stream without
its last message, and any status except OK count as errors. With `--bars`, the benchmark fails on errors, if less than
0.95 of the tokens are forwarded in `paced`, if the limit of the processor time or of the memory is exceeded in `paced`,
or if the limit of the time to first token is exceeded in `burst`.

`--profile FILE` samples the server during `paced` and `burst`, and writes the profile to FILE. Profiling slows the
server down, so the results of a profiled run must not be compared with the limits.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.gateways.brain import Brain, brain
from benchmarks.gateways.engines import HOST, Groups, engines
from benchmarks.gateways.load import Seen, Streams, load
from benchmarks.gateways.process import Child, Usage, child
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, resolve
from benchmarks.support.open_loop import percentile

TRACES = "paced,flood,burst"
NUM_GROUPS = 8
KEPT_UP_BAR = 0.95
CPU_BAR_US = 250.0
RSS_BAR_KIB = 100.0
BURST_TTFT_BAR_S = 2.0
BURST_CPU_BAR_MS = 5.0


@dataclass(frozen=True)
class Sizes:
    """Numbers of streams and tokens, rates and durations of the benchmark's loads."""

    num_streams: int
    stream_tokens: int
    rate: float
    """Number of tokens per second that each stream emits."""
    ramp_s: float
    """Length in seconds of the period in which the streams are started."""
    window_s: float
    num_flood: int
    flood_tokens: int
    num_burst: int
    burst_s: float


FULL = Sizes(2000, 45, 1.0, 10.0, 15.0, 500, 100, 2000, 5.0)
QUICK = Sizes(200, 24, 4.0, 1.0, 2.0, 50, 40, 200, 1.0)
_FLOOD_RATE = 100.0
_BURST_TOKENS, _BURST_RATE = 4, 20.0


@dataclass(frozen=True)
class Looked:
    """Resources used by the server, and tokens received by the clients, in one measured period."""

    before: Usage
    after: Usage
    num_tokens: int
    late_ms: list[float]
    seconds: float

    @property
    def cpu_us(self) -> float:
        """Processor time of the server per received token, in microseconds."""
        return (self.after.cpu_s - self.before.cpu_s) * 1e6 / max(self.num_tokens, 1)


class _Bench:
    """Runs the benchmark's processes, and collects their measurements."""

    def __init__(self, args: argparse.Namespace, sizes: Sizes, folder: Path) -> None:
        self._sizes, self._folder = sizes, folder
        self._reporter, self._bars = Reporter("gateway", args.json), Bars()
        self._console = Console(stderr=True, highlight=False)
        self._traces: list[str] = args.traces.split(",")
        self._profile_path: Path | None = args.profile
        self._profiles: list[str] = []

    async def run(self) -> Bars:
        """Measure all requested traces. Return the limits (bars) and whether the measured values meet them."""
        sizes = self._sizes
        traces = {
            "paced": (sizes.rate, sizes.num_streams, self._paced),
            "flood": (_FLOOD_RATE, sizes.num_flood, self._flood),
            "burst": (_BURST_RATE, sizes.num_burst, self._burst),
        }
        for name in self._traces:
            rate, num_streams, measure = traces[name]
            async with self._sides(rate, num_streams) as (server, clients):
                await measure(server, clients)
        if self._profile_path is not None:
            self._profile_path.write_text("\n".join(self._profiles))
        self._reporter.close()
        return self._bars

    async def _paced(self, server: Child, clients: Child) -> None:
        sizes = self._sizes
        await clients.ask(Streams(sizes.num_streams // 10, 4, 0.1 * sizes.ramp_s))  # one-time allocations
        await clients.ask("drain")
        empty: Usage = await server.ask("usage")
        await clients.ask(Streams(sizes.num_streams, sizes.stream_tokens, sizes.ramp_s))
        async with self._profiled(server, "paced"):
            looked = await self._look(server, clients, sizes.window_s)
        seen: Seen = await clients.ask("drain")
        rss_kib = (looked.after.rss_bytes - empty.rss_bytes) / 1024 / sizes.num_streams
        made_s = sizes.num_streams * sizes.rate
        tokens_s = looked.num_tokens / looked.seconds
        name = case(streams=sizes.num_streams, trace="paced")
        for metric, unit, value, baseline, its_value in (
            ("tokens_s", "1/s", tokens_s, "made", made_s),
            ("cpu_us", "us", looked.cpu_us, "promised", CPU_BAR_US),
            ("p99_ms", "ms", percentile(looked.late_ms, 99), "promised", 1e3 / sizes.rate),
            ("rss_kib", "KiB", rss_kib, "promised", RSS_BAR_KIB),
        ):
            self._reporter.add(name, metric, unit, baseline, Pairs([value], [its_value]))
        self._check("paced", seen, sizes.num_streams)
        self._bars.at_least("paced: tokens a second over those made", tokens_s / made_s, KEPT_UP_BAR)
        self._bars.at_most("paced: processor time a token, us", looked.cpu_us, CPU_BAR_US)
        self._bars.at_most("paced: memory a stream, KiB", rss_kib, RSS_BAR_KIB)

    async def _flood(self, server: Child, clients: Child) -> None:
        sizes = self._sizes
        loop = asyncio.get_running_loop()
        before: Usage = await server.ask("usage")
        began_s = loop.time()
        await clients.ask(Streams(sizes.num_flood, sizes.flood_tokens, 0.0))
        seen: Seen = await clients.ask("drain")
        seconds, after = loop.time() - began_s, await server.ask("usage")
        name = case(streams=sizes.num_flood, trace="flood")
        made_s = sizes.num_flood * _FLOOD_RATE
        self._reporter.add(name, "tokens_s", "1/s", "made", Pairs([seen.num_tokens / seconds], [made_s]))
        cpu_us = (after.cpu_s - before.cpu_s) * 1e6 / max(seen.num_tokens, 1)
        self._reporter.add(name, "cpu_us", "us", "promised", Pairs([cpu_us], [CPU_BAR_US]))
        self._check("flood", seen, sizes.num_flood)

    async def _burst(self, server: Child, clients: Child) -> None:
        sizes = self._sizes
        await clients.ask(Streams(sizes.num_burst // 10, _BURST_TOKENS, 0.1 * sizes.burst_s))
        await clients.ask("drain")
        before: Usage = await server.ask("usage")
        async with self._profiled(server, "burst"):
            await clients.ask(Streams(sizes.num_burst, _BURST_TOKENS, sizes.burst_s))
            seen: Seen = await clients.ask("drain")
        after: Usage = await server.ask("usage")
        name = case(streams=sizes.num_burst, trace="burst")
        ttft_s = percentile(seen.first_s, 99)
        cpu_ms = (after.cpu_s - before.cpu_s) * 1e3 / sizes.num_burst
        self._reporter.add(name, "ttft_s", "s", "promised", Pairs([ttft_s], [BURST_TTFT_BAR_S]))
        self._reporter.add(name, "cpu_ms", "ms", "promised", Pairs([cpu_ms], [BURST_CPU_BAR_MS]))
        self._check("burst", seen, sizes.num_burst)
        self._bars.at_most("burst: p99 of the time to first token, s", ttft_s, BURST_TTFT_BAR_S)

    def _check(self, trace: str, seen: Seen, num_streams: int) -> None:
        for text in sorted(set(seen.errors))[:3]:
            self._console.print(f"  {trace}: {text}", markup=False, style="red")
        name = case(streams=num_streams, trace=trace)
        num_errors = num_streams - seen.num_done
        self._reporter.add(name, "goodput", "streams", "asked", Pairs([seen.num_done], [num_streams]))
        self._bars.at_most(f"{trace}: errors, of {num_streams} streams", num_errors, 0)

    async def _look(self, server: Child, clients: Child, seconds: float) -> Looked:
        """Measure the server for `seconds` seconds."""
        loop = asyncio.get_running_loop()
        before: Usage = await server.ask("usage")
        num_before, _ = await clients.ask("seen")
        began_s = loop.time()
        await asyncio.sleep(seconds)  # the window that is measured
        after: Usage = await server.ask("usage")
        num_after, late_ms = await clients.ask("seen")
        return Looked(before, after, num_after - num_before, late_ms, loop.time() - began_s)

    @contextlib.asynccontextmanager
    async def _sides(self, rate: float, num_streams: int) -> AsyncIterator[tuple[Child, Child]]:
        """Start a server and clients, with groups whose streams emit `rate` tokens per second each."""
        groups = Groups(NUM_GROUPS, -(-num_streams // NUM_GROUPS), 1 / rate)
        async with child(engines, groups) as made:
            told = Brain(self._folder, tuple(made.greeting), groups.num_slots)
            async with child(brain, told) as server, child(load, f"{HOST}:{server.greeting}") as clients:
                yield server, clients

    @contextlib.asynccontextmanager
    async def _profiled(self, server: Child, trace: str) -> AsyncIterator[None]:
        if self._profile_path is None:
            yield
            return
        await server.ask("profile")
        yield
        self._profiles.append(f"{trace}: {await server.ask('profiled')}")


async def run(args: argparse.Namespace) -> int:
    """Measure all traces. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    bars = await _Bench(args, QUICK if args.quick else FULL, resolve(args)).run()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--traces", default=TRACES, help="traces to run")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write where the server's time goes")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
