"""How much time does a cached prefix save? Time to first token with one and without, for prompts of equal length.

A whole local cluster (orchestrator, a chain of ranks of one thread, a generation engine). Each round sends a new prompt
(`cold`), and one that begins like it and ends otherwise: its shared tokens are read where the first prompt's ranks have
left them. Then the second turn of a chat (`turn` in a case: tokens of the first answer): a prompt that begins with an
earlier one and its answer, against a new prompt of the same length. Rows: time to first token; KV pushed to the
generation engine, also against what that engine lacks (`missing`: all but whole blocks of its node, so 1). `--bars`
checks what is promised.
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
from deploy.groups.cluster import LocalCluster
from deploy.groups.local_cluster import running_scheduler
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
"""How many times sooner the first token must come with the prefix, at least."""


@dataclass(frozen=True)
class Asked:
    """The result of one prompt that went through the cluster."""

    ttft_s: float
    num_bytes_pushed: int
    num_cached_tokens: int
    known_ids: tuple[int, ...]
    """Token ids of the prompt and of its answer."""


async def ask(scheduler: RequestScheduler, prompt_ids: tuple[int, ...], num_tokens: int = 1) -> Asked:
    """Send a prompt for `num_tokens` tokens. Raises the error that ended the request, if any."""
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
    """Measure prompts with a cached prefix and cold ones, one of each a round, after a round that is not counted."""
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
    """Measure second turns and cold prompts of the same length, one of each a round, after a round that is not
    counted."""
    second, cold = [], []
    with progress(f"second turn behind {num_first} tokens and {num_answer} of an answer", pairs + 1) as advance:
        for seed in range(pairs + 1):
            first = await ask(scheduler, random_prompt(num_first, 3000 + seed), num_answer)
            second.append(await ask(scheduler, first.known_ids + random_prompt(num_new, 4000 + seed)))
            cold.append(await ask(scheduler, random_prompt(num_first + num_answer + num_new, 5000 + seed)))
            advance()
    assert not any(each.num_cached_tokens for each in cold), "a prompt that was to be cold was not"
    return second[1:], cold[1:]


@dataclass(frozen=True)
class Case:
    """One kind of known beginning, and what was measured of it."""

    name: str
    what: str
    """Readable description of the known beginning."""
    num_lacking: int
    """Tokens whose KV the generation engine's node lacks: all but whole blocks of what was seen."""
    warm: list[Asked]
    cold: list[Asked]

    @property
    def lacking_bytes(self) -> float:
        """Bytes of the KV of the lacking tokens, from a cold prompt, whose KV was pushed whole."""
        cold = self.cold[0]
        return self.num_lacking * cold.num_bytes_pushed / (len(cold.known_ids) - 1)

    def report(self, reporter: Reporter) -> float:
        """Report the rows of this case; return how many times sooner the first token came."""
        ttft = Pairs([each.ttft_s for each in self.warm], [each.ttft_s for each in self.cold])
        pushed = [float(each.num_bytes_pushed) for each in self.warm]
        row = reporter.add(self.name, "ttft_s", "s", "cold", ttft)
        reporter.add(self.name, "kv_bytes", "B", "cold", Pairs(pushed, [each.num_bytes_pushed for each in self.cold]))
        reporter.add(self.name, "kv_bytes", "B", "missing", Pairs(pushed, [self.lacking_bytes] * len(pushed)))
        return row.ratio


async def run(args: argparse.Namespace) -> int:
    """Measure all rounds; with --bars, return 1 when a bar is missed."""
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
        ),  # the last one has no KV
    ):
        ratio = each.report(reporter)
        if args.bars:
            bars.at_least(f"TTFT cold over behind {each.what}", ratio, TTFT_BAR)
            most = max(asked.num_bytes_pushed for asked in each.warm)
            bars.at_most(f"KV pushed over missing, behind {each.what}", most / each.lacking_bytes, 1.0)
    reporter.close()
    return bars.close()


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the chain, one thread each")
    parser.add_argument(
        "--shared", type=int, default=0, help=f"tokens; 0: {SHARED_TOKENS}, or {QUICK_SHARED_TOKENS} with --quick"
    )
    parser.add_argument("--new", type=int, default=NEW_TOKENS, help="tokens behind the shared ones")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when what is promised does not hold")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
