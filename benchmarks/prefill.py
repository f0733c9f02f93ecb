"""Benchmark of the time to first token: compares a cluster that prefills on a chain of ranks with one colocated engine,
which prefills and generates (`single`).

Both are real local clusters, which run at the same time and are measured alternately. The time is measured from sending
the prompt to receiving the first token. Both use the same number of cores: `--ranks` ranks of one thread, or one engine
of `--ranks` threads.
"""

import argparse
import asyncio
import contextlib
import sys
import uuid

from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.types import RequestId, TokenEvent
from benchmarks.support.harness import PAIRS, QUICK_PAIRS, Pairs, Reporter, case, make_parser, random_prompt, resolve
from benchmarks.support.local_config import local_config
from deploy.commands.session import running_scheduler
from deploy.groups.cluster import LocalCluster
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.resolved_model import ResolvedModel
from orchestrator.requests.request import Request
from orchestrator.scheduler import RequestScheduler

LENGTHS = "512,2048,6000"
QUICK_LENGTHS = "512"


async def ttft_s(scheduler: RequestScheduler, num_tokens: int, seed: int) -> float:
    """Send a random prompt of `num_tokens` tokens that requests one output token. Return the seconds until this token
    arrives."""
    clock = SystemClock()
    spec = Request(
        RequestId(uuid.uuid4().hex), random_prompt(num_tokens, seed), SamplingParams(max_tokens=1, ignore_eos=True)
    )
    start = clock.now_s()
    async with contextlib.aclosing(scheduler.generate(spec)) as events:
        async for event in events:
            if isinstance(event, TokenEvent):
                return clock.now_s() - start
    raise AssertionError("a stream without a token")


async def measure(args: argparse.Namespace) -> None:
    """Measure the time to first token for all prompt lengths, and report it."""
    model, pairs = ResolvedModel(resolve(args)), QUICK_PAIRS if args.quick else PAIRS
    lengths = [int(n) for n in (args.tokens or (QUICK_LENGTHS if args.quick else LENGTHS)).split(",")]
    reporter, clock = Reporter("prefill", args.json), SystemClock()
    chain = local_config(args.dtype, num_ranks=args.ranks)
    single = local_config(args.dtype, num_ranks=0, prefix_share=0.1, num_threads=args.ranks, max_batched_tokens=8192)
    async with (
        LocalCluster(ClusterPlan(chain, model), clock) as ours,
        LocalCluster(ClusterPlan(single, model), clock) as theirs,
        running_scheduler(ours, clock) as chained,
        running_scheduler(theirs, clock) as colocated,
    ):
        sides = [chained, colocated]
        for num_tokens in lengths:
            times: list[list[float]] = [[], []]
            for index in range(pairs + 1):
                for side, scheduler in enumerate(sides):
                    times[side].append(await ttft_s(scheduler, num_tokens, seed=index))
            name = case(tokens=num_tokens, ranks=args.ranks, scheme="even", dtype=args.dtype)
            reporter.add(name, "ttft_s", "s", "single", Pairs(times[0][1:], times[1][1:]))
    reporter.close()


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", default=None, help=f"prompt lengths (default {LENGTHS})")
    parser.add_argument(
        "--ranks", type=int, default=2, help="number of ranks of the chain, and of threads of the single engine"
    )
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
