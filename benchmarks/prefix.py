"""Benchmark of the prefix cache: compares the time to first token with and without a cached prefix, for prompts of
equal length.

A whole local cluster runs: an orchestrator, a chain of ranks with one thread each, and a generation engine. Each round
sends a new prompt (`cold`), then a prompt with the same prefix and a different end. The second prompt reuses the
prefix's KV, which the ranks stored for the first one.

A second case is the next turn of a chat (`turn=N` in the row's name: the first answer has N tokens). The prompt of the
next turn begins with an earlier prompt and the answer to it. It is compared with a new prompt of the same length.

Output rows: time to first token, and KV bytes pushed to the generation engine. The bytes pushed are also compared with
the bytes that must be pushed (`missing`). The engine's node already has the KV of the cached prefix in whole blocks, so
only the KV of the prompt's other tokens must be pushed. The ratio should be 1. With `--bars`, the benchmark fails if a
value misses its limit.
"""

import argparse
import asyncio
import contextlib
import sys
import uuid
from dataclasses import dataclass

from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.types import RequestId, TokenEvent
from benchmarks.support.harness import (
    PAIRS,
    QUICK_PAIRS,
    Bars,
    Pairs,
    Reporter,
    case,
    make_parser,
    progress,
    random_prompt,
    resolve,
)
from benchmarks.support.local_config import local_config
from deploy.commands.session import running_scheduler
from deploy.groups.cluster import LocalCluster
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.resolved_model import ResolvedModel
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import Finished
from orchestrator.requests.request import Request
from orchestrator.scheduler import RequestScheduler

SHARED_TOKENS = 4000
QUICK_SHARED_TOKENS = 512
NEW_TOKENS = 50
ANSWER_TOKENS = 256
QUICK_ANSWER_TOKENS = 130
BLOCK = OrchestratorConfig.block_tokens
TTFT_BAR = 8.0
"""Minimum ratio of the time to first token without a cached prefix to the time with one."""


@dataclass(frozen=True)
class Asked:
    """Result of one prompt that passed through the cluster."""

    ttft_s: float
    num_bytes_pushed: int
    num_cached_tokens: int
    known_ids: tuple[int, ...]
    """Token ids of the prompt, followed by those of the answer."""


async def ask(scheduler: RequestScheduler, prompt_ids: tuple[int, ...], num_tokens: int = 1) -> Asked:
    """Send a prompt, request `num_tokens` output tokens, and return the result. Raises the error that ended the
    request, if any."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    spec = Request(RequestId(uuid.uuid4().hex), prompt_ids, params)
    finished: Finished | None = None
    known_ids = prompt_ids
    async with contextlib.aclosing(scheduler.generate(spec)) as events:
        async for event in events:
            if isinstance(event, TokenEvent) and event.token is not None:
                known_ids = (*known_ids, event.token.token_id)
            finished = event if isinstance(event, Finished) else finished
    assert finished is not None, "a stream ended without its last event"
    if finished.error is not None:
        raise finished.error
    ttft_s = finished.timings.time_to_first_token_s
    assert ttft_s is not None, "a stream ended without a token"
    pushed = sum(rank.num_bytes_pushed for rank in finished.timings.prefill.ranks)
    return Asked(ttft_s, pushed, finished.usage.num_cached_tokens, known_ids)


async def measure(
    scheduler: RequestScheduler, num_shared: int, num_new: int, pairs: int
) -> tuple[list[Asked], list[Asked]]:
    """Measure `pairs` rounds, after a warm-up round. A round sends two prompts, which share their first `num_shared`
    tokens and differ in their last `num_new` tokens. The second prompt reuses the cached KV of the first. Return
    (results of the second prompts, results of the first prompts), with one entry per round."""
    warm, cold = [], []
    with progress(f"{num_shared} shared tokens, {num_new} new", pairs + 1) as advance:
        for seed in range(pairs + 1):
            shared = random_prompt(num_shared, seed)
            cold.append(await ask(scheduler, shared + random_prompt(num_new, 1000 + seed)))
            warm.append(await ask(scheduler, shared + random_prompt(num_new, 2000 + seed)))
            advance()
    assert not any(each.num_cached_tokens for each in cold), "a prompt that was to be cold was not"
    return warm[1:], cold[1:]


async def measure_turns(
    scheduler: RequestScheduler, num_first: int, num_answer: int, num_new: int, pairs: int
) -> tuple[list[Asked], list[Asked]]:
    """Measure `pairs` rounds, after a warm-up round. A round sends a prompt of `num_first` tokens and requests
    `num_answer` tokens. It then sends the second turn of this chat, with `num_new` more tokens, and a new prompt of the
    same length. Return (results of the second turns, results of the new prompts), with one entry per round."""
    second, cold = [], []
    with progress(f"second turn after {num_first} tokens and an answer of {num_answer}", pairs + 1) as advance:
        for seed in range(pairs + 1):
            first = await ask(scheduler, random_prompt(num_first, 3000 + seed), num_answer)
            second.append(await ask(scheduler, first.known_ids + random_prompt(num_new, 4000 + seed)))
            cold.append(await ask(scheduler, random_prompt(num_first + num_answer + num_new, 5000 + seed)))
            advance()
    assert not any(each.num_cached_tokens for each in cold), "a prompt that was to be cold was not"
    return second[1:], cold[1:]


@dataclass(frozen=True)
class Case:
    """One kind of cached prefix, with its measurements and those of prompts without a cached prefix."""

    name: str
    what: str
    """Description of the cached prefix in messages about limits, for example "4000 tokens"."""
    num_lacking: int
    """Number of the prompt's tokens whose KV must be pushed to the generation engine. The engine's node already has the
    KV of the other tokens: the whole blocks of the cached prefix."""
    warm: list[Asked]
    cold: list[Asked]

    @property
    def lacking_bytes(self) -> float:
        """Number of KV bytes that must be pushed to the generation engine: `num_lacking` tokens times the bytes per
        token. The bytes per token were measured for a prompt without a cached prefix, whose KV is pushed completely."""
        cold = self.cold[0]
        return self.num_lacking * cold.num_bytes_pushed / (len(cold.known_ids) - 1)

    def report(self, reporter: Reporter) -> float:
        """Add the output rows of this case. Return the ratio of the time to first token without a cached prefix to the
        time with one."""
        ttft = Pairs([each.ttft_s for each in self.warm], [each.ttft_s for each in self.cold])
        pushed = [float(each.num_bytes_pushed) for each in self.warm]
        row = reporter.add(self.name, "ttft_s", "s", "cold", ttft)
        reporter.add(self.name, "kv_bytes", "B", "cold", Pairs(pushed, [each.num_bytes_pushed for each in self.cold]))
        reporter.add(self.name, "kv_bytes", "B", "missing", Pairs(pushed, [self.lacking_bytes] * len(pushed)))
        return row.ratio


async def run(args: argparse.Namespace) -> int:
    """Measure all rounds. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    num_shared = args.shared or (QUICK_SHARED_TOKENS if args.quick else SHARED_TOKENS)
    num_answer = QUICK_ANSWER_TOKENS if args.quick else ANSWER_TOKENS
    num_turn, new, ranks = num_shared + num_answer, args.new, args.ranks
    reporter, bars, clock = Reporter("prefix", args.json), Bars(), SystemClock()
    folder, config = resolve(args), local_config(args.dtype, num_ranks=ranks, prefix_share=0.1)
    async with (
        LocalCluster(ClusterPlan(config, ResolvedModel(folder)), clock) as cluster,
        running_scheduler(cluster, clock) as scheduler,
    ):
        pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
        shared = await measure(scheduler, num_shared, new, pairs)
        turns = await measure_turns(scheduler, num_shared, num_answer, new, pairs)
    name = case(tokens=num_shared + new, ranks=ranks, shared=num_shared)
    turn_name = case(tokens=num_turn + new, ranks=ranks, shared=num_turn, turn=num_answer)
    for each in (
        Case(name, f"{num_shared} tokens", new + num_shared % BLOCK, *shared),
        Case(
            turn_name, f"a turn of {num_turn} tokens", new + 1 + (num_turn - 1) % BLOCK, *turns
        ),  # the last token has no KV
    ):
        ratio = each.report(reporter)
        if args.bars:
            bars.at_least(f"TTFT cold over cached, {each.what}", ratio, TTFT_BAR)
            most = max(asked.num_bytes_pushed for asked in each.warm)
            bars.at_most(f"KV pushed over missing, {each.what}", most / each.lacking_bytes, 1.0)
    reporter.close()
    return bars.close()


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks of the chain, one thread each")
    parser.add_argument(
        "--shared",
        type=int,
        default=0,
        help=f"number of shared tokens; 0: {SHARED_TOKENS}, or {QUICK_SHARED_TOKENS} with --quick",
    )
    parser.add_argument("--new", type=int, default=NEW_TOKENS, help="number of tokens after the shared ones")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
