"""What does a cached prefix save? Time to first token behind one, against the same prompt from its beginning.

A whole local relay (orchestrator, a chain of ranks of one thread, a generation engine). In each round a prompt that
nobody has seen (`cold`), and one that begins like it and ends otherwise: its shared tokens are read where the first
prompt's ranks have left them. Rows: time to first token, and KV pushed to the generation engine. `--bars` checks what
is promised.
"""

import argparse
import asyncio
import contextlib
import sys
import uuid
from dataclasses import dataclass

from baton.clock import SystemClock
from baton.ids import RequestId
from baton.sampling_params import SamplingParams
from benchmarks.harness import (
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
from deploy.cluster import LocalCluster
from deploy.config import LocalConfig
from deploy.local_relay import running_controller
from orchestrator.controller import Controller, GenerateSpec
from orchestrator.lifecycle import Finished

SHARED_TOKENS = 4000
QUICK_SHARED_TOKENS = 512
NEW_TOKENS = 50
TTFT_BAR = 8.0
"""How many times sooner the first token comes behind the prefix, at least."""


@dataclass(frozen=True)
class Asked:
    """One prompt's way through the relay."""

    ttft_s: float
    num_bytes_pushed: int
    num_cached_tokens: int


async def ask(controller: Controller, prompt_ids: tuple[int, ...]) -> Asked:
    """One token after the prompt. Raises what the request ended with, if that was an error."""
    spec = GenerateSpec(RequestId(uuid.uuid4().hex), prompt_ids, SamplingParams(max_tokens=1, ignore_eos=True))
    finished: Finished | None = None
    async with contextlib.aclosing(controller.generate(spec)) as events:
        async for event in events:
            finished = event if isinstance(event, Finished) else finished
    assert finished is not None, "a stream ended without its last event"
    if finished.error is not None:
        raise finished.error
    ttft_s = finished.timings.time_to_first_token_s
    assert ttft_s is not None, "a stream ended without a token"
    pushed = sum(rank.num_bytes_pushed for rank in finished.timings.ranks)
    return Asked(ttft_s, pushed, finished.usage.num_cached_tokens)


async def measure(controller: Controller, num_shared: int, num_new: int, pairs: int) -> tuple[list[Asked], list[Asked]]:
    """Behind a prefix and cold, a round each; one that is not counted comes before."""
    warm, cold = [], []
    with progress(f"{num_shared} shared tokens, {num_new} new", pairs + 1) as advance:
        for seed in range(pairs + 1):
            shared = random_prompt(num_shared, seed)
            cold.append(await ask(controller, shared + random_prompt(num_new, 1000 + seed)))
            warm.append(await ask(controller, shared + random_prompt(num_new, 2000 + seed)))
            advance()
    assert not any(each.num_cached_tokens for each in cold), "a prompt that was to be cold was not"
    return warm[1:], cold[1:]


async def run(args: argparse.Namespace) -> int:
    """All rounds; with --bars 1 when what is promised does not hold."""
    num_shared = args.shared or (QUICK_SHARED_TOKENS if args.quick else SHARED_TOKENS)
    reporter, bars, clock = Reporter("prefix", args.json), Bars(), SystemClock()
    config = LocalConfig(resolve(args), num_ranks=args.ranks, dtype=args.dtype, generate_threads=1)
    async with LocalCluster(config, clock) as cluster, running_controller(cluster, clock) as controller:
        pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
        warm, cold = await measure(controller, num_shared, args.new, pairs)
    name = case(tokens=num_shared + args.new, ranks=args.ranks, shared=num_shared)
    ttft = Pairs([each.ttft_s for each in warm], [each.ttft_s for each in cold])
    pushed = Pairs([each.num_bytes_pushed for each in warm], [each.num_bytes_pushed for each in cold])
    row = reporter.add(name, "ttft_s", "s", "cold", ttft)
    reporter.add(name, "kv_bytes", "B", "cold", pushed)
    reporter.close()
    if args.bars:
        bars.at_least(f"TTFT cold over behind {num_shared} tokens", row.ratio, TTFT_BAR)
    return bars.close()


def main() -> int:
    """Runs the benchmark."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="of the chain, one thread each")
    parser.add_argument(
        "--shared", type=int, default=0, help=f"tokens; 0: {SHARED_TOKENS}, or {QUICK_SHARED_TOKENS} with --quick"
    )
    parser.add_argument("--new", type=int, default=NEW_TOKENS, help="tokens behind the shared ones")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when what is promised does not hold")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
