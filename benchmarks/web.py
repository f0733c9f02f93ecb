"""Benchmark of HTTP: measures the latency that HTTP adds to gRPC, and how many streams of server-sent events one HTTP
gateway can serve.

The real orchestrator and the real HTTP gateway run in separate processes. Generation groups emit scripted tokens at a
given pace without computing (`benchmarks.gateways`). HTTP and gRPC clients also run in separate processes.

- `trace=short`: 64 streams start at random times within two seconds and receive 20 tokens per second each. Each round
  runs this load once over HTTP and once over gRPC. Output rows: the median time to first token, compared with gRPC; and
  the processor time per token of the gateway's process. The latter is compared with its limit (baseline `promised`),
  and with the processor time of a client that only receives the same streams over gRPC (baseline `grpc`).
- `trace=held`: 2,000 streams at once over HTTP, one token per second each. Output rows: p99 of the time from the engine
  to the client, and the tokens received compared with the tokens emitted.

A missing token, a stream whose finish reason is not `length`, and any status except 200 count as errors. If `--bars` is
given, the benchmark fails in any of these cases: an error occurs; HTTP adds more than 3 ms to the time to first token,
or uses more than 0.2 ms of processor time per token; in `held`, fewer than 95 % of the emitted tokens are received, or
p99 is above 500 ms.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop
from rich.console import Console

from benchmarks.gateways.brain import Brain, brain
from benchmarks.gateways.engines import HOST, Groups, engines
from benchmarks.gateways.load import Seen, Streams, load
from benchmarks.gateways.process import Child, Usage, child
from benchmarks.gateways.web import http_gateway, http_load
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, progress, resolve
from benchmarks.support.open_loop import percentile

NUM_GROUPS = 8
ADDED_BAR_MS = 3.0
CPU_BAR_US = 200.0
LATE_BAR_MS = 500.0
KEPT_UP_BAR = 0.95
SHORT = Streams(64, 40, 2.0)
_SHORT_RATE = 20.0
HELD, QUICK_HELD = Streams(2000, 40, 10.0), Streams(200, 12, 1.0)
_WINDOW_S, _QUICK_WINDOW_S = 15.0, 3.0
ROUNDS, QUICK_ROUNDS = 5, 1


class _Bench:
    """Runs the benchmark's processes, and collects their measurements."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._folder, self._is_quick = folder, args.quick
        self._rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
        self._reporter, self._bars = Reporter("web", args.json), Bars()
        self._console = Console(stderr=True, highlight=False)

    async def run(self) -> Bars:
        """Measure both loads (`short` and `held`). Return the checks of the measured values against their limits
        (bars)."""
        await self._short()
        await self._held()
        self._reporter.close()
        return self._bars

    async def _short(self) -> None:
        first_ms: dict[str, list[float]] = {"http": [], "grpc": []}
        cpu_us: dict[str, list[float]] = {"http": [], "grpc": []}
        async with self._sides(_SHORT_RATE, SHORT.num_streams) as (gateway, web, direct):
            sides = {"http": (web, gateway), "grpc": (direct, direct)}
            with progress("short", self._rounds + 1) as advance:
                for number in range(self._rounds + 1):
                    for side, (clients, receiving) in sides.items():
                        before: Usage = await receiving.ask("usage")
                        seen = await self._ask(clients, SHORT)
                        after: Usage = await receiving.ask("usage")
                        if number:  # the first round includes one-time work
                            first_ms[side].append(1e3 * statistics.median(seen.first_s))
                            cpu_us[side].append((after.cpu_s - before.cpu_s) * 1e6 / seen.num_tokens)
                    advance()
        name = case(streams=SHORT.num_streams, trace="short")
        self._reporter.add(name, "ttft_ms", "ms", "grpc", Pairs(first_ms["http"], first_ms["grpc"]))
        self._reporter.add(name, "cpu_us", "us", "promised", Pairs(cpu_us["http"], [CPU_BAR_US] * self._rounds))
        self._reporter.add(name, "cpu_us", "us", "grpc", Pairs(cpu_us["http"], cpu_us["grpc"]))
        added = [ours - theirs for ours, theirs in zip(first_ms["http"], first_ms["grpc"], strict=True)]
        self._bars.at_most("short: added to the first token, ms", statistics.median(added), ADDED_BAR_MS)
        self._bars.at_most("short: processor time a token, us", statistics.median(cpu_us["http"]), CPU_BAR_US)

    async def _held(self) -> None:
        asked, window_s = (QUICK_HELD, _QUICK_WINDOW_S) if self._is_quick else (HELD, _WINDOW_S)
        async with self._sides(1.0, asked.num_streams) as (gateway, web, _):
            await web.ask(asked)
            before: Usage = await gateway.ask("usage")
            num_before, _ = await web.ask("seen")
            await asyncio.sleep(window_s)  # the window that is measured
            num_after, late_ms = await web.ask("seen")
            after: Usage = await gateway.ask("usage")
            seen: Seen = await web.ask("drain")
        name, num_tokens = case(streams=asked.num_streams, trace="held"), num_after - num_before
        made, late = asked.num_streams * window_s, percentile(late_ms, 99)
        cpu_us = (after.cpu_s - before.cpu_s) * 1e6 / num_tokens
        for metric, unit, value, baseline, its_value in (
            ("tokens_s", "1/s", num_tokens / window_s, "made", made / window_s),
            ("p99_ms", "ms", late, "promised", LATE_BAR_MS),
            ("cpu_us", "us", cpu_us, "promised", CPU_BAR_US),
        ):
            self._reporter.add(name, metric, unit, baseline, Pairs([value], [its_value]))
        self._check("held", seen, asked)
        self._bars.at_least("held: tokens over those made", num_tokens / made, KEPT_UP_BAR)
        self._bars.at_most("held: p99 of the time from engine to client, ms", late, LATE_BAR_MS)

    async def _ask(self, clients: Child, asked: Streams) -> Seen:
        await clients.ask(asked)
        seen: Seen = await clients.ask("drain")
        self._check("short", seen, asked)
        return seen

    def _check(self, trace: str, seen: Seen, asked: Streams) -> None:
        for text in sorted(set(seen.errors))[:3]:
            self._console.print(f"  {trace}: {text}", markup=False, style="red")
        self._bars.at_most(f"{trace}: errors, of {asked.num_streams} streams", asked.num_streams - seen.num_done, 0)

    @contextlib.asynccontextmanager
    async def _sides(self, rate: float, num_streams: int) -> AsyncIterator[tuple[Child, Child, Child]]:
        """Start groups whose streams emit `rate` tokens per second each, a server, an HTTP gateway, and the clients of
        both. Yield the gateway, the gateway's clients, and the server's clients."""
        groups = Groups(NUM_GROUPS, -(-num_streams // NUM_GROUPS), 1 / rate, says_time=True)
        async with child(engines, groups) as made:
            told = Brain(self._folder, tuple(made.greeting), groups.num_slots)
            async with child(brain, told) as server:
                target = f"{HOST}:{server.greeting}"
                async with (
                    child(http_gateway, target, self._folder, new_loop=uvloop.new_event_loop) as gateway,
                    child(http_load, f"http://{HOST}:{gateway.greeting}") as web,
                    child(load, target) as direct,
                ):
                    yield gateway, web, direct


async def run(args: argparse.Namespace) -> int:
    """Measure both loads (`short` and `held`). Return 0, or 1 if `--bars` is given and a value misses its limit."""
    bars = await _Bench(args, resolve(args)).run()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help=f"number of rounds of `short`; 0: {ROUNDS}, or {QUICK_ROUNDS} with --quick",
    )
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
