"""Benchmark of the effect of speculation on clients. Sends a mixed trace through `baton serve`, with speculation and
without.

Short chats and summaries of long passages (tests/data) arrive at random times and stream greedy answers. Two clusters
on the same Ray cluster differ only in `generate.speculation`. Both run all the time, and serve the same arrivals
alternately. Output rows compare `auto` with `off` in these metrics:

- median and 99th percentile, over the requests, of the mean time per output token
- 99th percentile of the time to first token
- tokens per second from the first arrival to the last token
- largest gap between two messages of a stream

With `--bars`, the benchmark fails if a value misses its limit.
"""

import argparse
import asyncio
import gzip
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import time_ns

from rich.console import Console

from baton.client import AsyncClient
from baton.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton_lab.served_child import own_cluster, until_signal
from benchmarks.support.answers import Answer
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, progress, resolve
from benchmarks.support.open_loop import percentile

ROUNDS = 3
NUM_CHATS, NUM_SUMMARIES, SECONDS = 24, 6, 60.0
QUICK_CHATS, QUICK_SUMMARIES, QUICK_SECONDS = 3, 1, 4.0
SUMMARY_TOKENS = 6000
_CHAT_TOKENS = 40, 250
_ANSWER_TOKENS = 160
TAIL_BAR = 1.10
"""Maximum ratio of a 99th percentile with `speculation = auto` to the same percentile with `speculation = off`. Applies
to the time to first token and to the time per output token."""
_METRICS = (
    ("tpot_ms", "ms"),
    ("tokens_s", "tokens/s"),
    ("ttft_p99_s", "s"),
    ("tpot_p99_ms", "ms"),
    ("largest_gap_ms", "ms"),
)
_DATA = Path(__file__).parents[1] / "tests/data"
_TEXTS = ("emma", "persuasion", "prideprejudice")


@dataclass(frozen=True)
class Arrival:
    """A request of the trace."""

    at_s: float
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Served:
    """Answers of one of the two clusters in one round."""

    answers: Sequence[Answer]

    def metric(self, name: str) -> float:
        """Return the value of the metric `tpot_ms`, `tpot_p99_ms`, `ttft_p99_s` or `largest_gap_ms`. For any other
        name, return the tokens per second."""
        answers = self.answers
        tpot = [each.tpot_ms for each in answers]
        if name == "tpot_ms":
            return statistics.median(tpot)
        if name == "tpot_p99_ms":
            return percentile(tpot, 99)
        if name == "ttft_p99_s":
            return percentile([each.ttft_s for each in answers], 99)
        if name == "largest_gap_ms":
            return max(max(each.gaps_ms) for each in answers)
        seconds = max(each.message_ns[-1] for each in answers) - min(each.asked_ns for each in answers)
        return sum(each.num_tokens for each in answers) / seconds * 1e9


def trace(tokenizer: Tokenizer, seed: int, *, quick: bool) -> list[Arrival]:
    """Return a trace of chats and summaries with random arrival times, which depend only on the seed. The first request
    is a summary."""
    num_chats, num_long, seconds = (
        (QUICK_CHATS, QUICK_SUMMARIES, QUICK_SECONDS) if quick else (NUM_CHATS, NUM_SUMMARIES, SECONDS)
    )
    rng = random.Random(seed)
    texts = [tokenizer.encode(gzip.decompress((_DATA / f"{name}.txt.gz").read_bytes()).decode()) for name in _TEXTS]

    def prompt(question: str, num_tokens: int) -> tuple[int, ...]:
        text = rng.choice(texts)
        start = rng.randrange(len(text) - num_tokens)
        content = f"{question}\n\n{tokenizer.decode(text[start : start + num_tokens])}"
        return tuple(tokenizer.encode_chat([{"role": "user", "content": content}]))

    chats = [prompt("What happens here?", rng.randint(*_CHAT_TOKENS)) for _ in range(num_chats)]
    summaries = [prompt("Summarize this passage.", SUMMARY_TOKENS) for _ in range(num_long)]
    times = [rng.uniform(0.0, seconds) for _ in range(num_chats + num_long - 1)]
    arrivals = zip([0.0, *times], [*summaries, *chats], strict=True)
    return sorted((Arrival(*each) for each in arrivals), key=lambda each: each.at_s)


async def serve(client: AsyncClient, arrivals: Sequence[Arrival]) -> Served:
    """Send each request at its arrival time, without waiting for earlier answers. Return all answers."""
    return Served(await asyncio.gather(*(_ask(client, each) for each in arrivals)))


async def _ask(client: AsyncClient, arrival: Arrival) -> Answer:
    await asyncio.sleep(arrival.at_s)  # from the trace's start
    asked_ns, message_ns, num_tokens = time_ns(), list[int](), 0
    params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    async with client.generate(token_ids=arrival.prompt, params=params) as stream:
        async for event in stream:
            if event.token is not None:
                num_tokens += 1
                if not message_ns or event.unix_ns > message_ns[-1]:
                    message_ns.append(event.unix_ns)
    return Answer(asked_ns, tuple(message_ns), num_tokens)


async def run(args: argparse.Namespace) -> int:
    """Measure all rounds, after a short warm-up round. Return 0, or 1 if `--bars` is given and a value misses its
    limit."""
    folder, console = resolve(args), Console(stderr=True, highlight=False)
    reporter, bars = Reporter("mixed_trace", args.json), Bars()
    tokenizer, address = Tokenizer.load(folder), ""
    found: dict[str, list[Served]] = {"auto": [], "off": []}
    rounds = 1 if args.quick else args.rounds
    async with AsyncExitStack() as stack:
        clients = {}
        for name in found:
            settings = [
                f"model.name={folder}",
                f"model.dtype={args.dtype}",
                "prefill.prefix_share=0",
                "arrangement=configured",
            ]
            settings += [f"generate.speculation={name}", *args.set, *([f"ray.address={address}"] if address else [])]
            options = [part for each in settings for part in ("--set", each)]
            cluster = await stack.enter_async_context(
                own_cluster(f"trace-{name}", options, lambda line: console.print(f"  {line}", markup=False))
            )
            address = cluster.ray_address  # on one Ray, because a second one would use part of the cores
            clients[name] = await stack.enter_async_context(AsyncClient(cluster.target))
        with progress("arrivals", 2 * (rounds + 1)) as advance:
            for seed in range(rounds + 1):
                arrivals = trace(tokenizer, seed, quick=args.quick or not seed)
                for name, client in clients.items():
                    served = await serve(client, arrivals)
                    found[name] += [served] if seed else []
                    advance()
    for metric, unit in _METRICS:
        ours, theirs = ([each.metric(metric) for each in found[name]] for name in found)
        row = reporter.add(case(policy="auto", trace="mixed"), metric, unit, "off", Pairs(ours, theirs))
        if "p99" in metric:
            bars.at_most(f"{metric}, auto over off", 1 / row.ratio, TAIL_BAR)
        elif metric != "largest_gap_ms":
            bars.at_least(f"{metric}, auto compared with off", row.ratio, 1.0)
    reporter.close()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of traces that both sides serve")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING", help="setting of both clusters")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return asyncio.run(until_signal(run(parser.parse_args())))


if __name__ == "__main__":
    sys.exit(main())
