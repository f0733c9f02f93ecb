"""Measures the cost of the orchestrator's bookkeeping for given numbers of blocks, workers and groups. The measured
parts are the prefix index, the statuses of workers, and the view of the cluster (the list of all groups).

    prefix index    eight stores of 125,000 blocks each: memory per block, and the times to write a block, to look up a
                    block in one store, and to find all stores that have a block
    worker_poller   CPU time of the orchestrator for the status of one worker. Scripted generation groups in another
                    process report the statuses. In a busy cluster, the orchestrator queries every worker twice a
                    second. The supervisor makes the same call to every worker once a second
    view            time to parse a view of `num_groups` groups, which the supervisor pushes once a second
"""

import argparse
import asyncio
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import TypeVar

from baton.prefix_blocks import PromptBlocks
from baton.process.clock import SystemClock
from baton.transport.identity import ClusterSecret
from baton.types import Epoch
from benchmarks.gateways.engines import Groups, engines
from benchmarks.gateways.process import child
from deploy.options.screen import number_table
from orchestrator.api.keeping import view_from_proto, view_to_proto
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.workers.client import Clients
from orchestrator.workers.worker_poller import WorkerPoller

T = TypeVar("T")
Row = tuple[str, str, float, str]
"""One line of the result table: (part, measure, value, unit)."""
STORES = tuple(f"store-{number}" for number in range(8))
BLOCKS = 64
"""Number of blocks of each prompt in the prefix index. With the default block size of 128 tokens, this is a prompt of
8,192 tokens."""
ROUNDS = 20
SECRET = ClusterSecret("0" * 64)


def main() -> int:
    """Run the measurements and print the table. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--blocks", default=1_000_000, type=int, metavar="N", help="number of blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", default=32, type=int, metavar="N", help="number of polled workers (default: %(default)s)"
    )
    parser.add_argument(
        "--groups", default=1000, type=int, metavar="N", help="number of groups in the view (default: %(default)s)"
    )
    args = parser.parse_args()
    table = number_table("bookkeeping of the orchestrator", ["part", "measure", "value", "unit"])
    rows = [*index_rows(args.blocks), asyncio.run(census_row(args.workers)), view_row(args.groups)]
    for part, measure, value, unit in rows:
        print(part, measure, f"{value:.3g}", unit, sep=", ", flush=True)
        table.add_row(part, measure, f"{value:.3g}", unit)
    return 0


def index_rows(num_blocks: int) -> list[Row]:
    """Measure the memory and the access times of a prefix index with `num_blocks` blocks."""
    num_prompts = max(num_blocks // BLOCKS, 1)
    tracemalloc.start()
    index = PrefixIndex()
    for number in range(num_prompts):
        index.use(*_place(number))
    num_held, num_bytes = len(index), tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    places = [_place(number) for number in range(0, num_prompts, max(num_prompts // 2000, 1))]
    return [
        ("prefix index", f"memory a block, of {num_held}", num_bytes / num_held, "bytes"),
        ("prefix index", "write a block", _each_us(lambda at: index.use(*at), places) / BLOCKS, "us"),
        ("prefix index", "look a block up in a store", _each_us(lambda at: index.num_held(*at), places) / BLOCKS, "us"),
        ("prefix index", "look for a name in 8 stores", _each_us(lambda at: index.holders(at[1][0]), places), "us"),
    ]


async def census_row(num_workers: int) -> Row:
    """Query the statuses of `num_workers` workers. Return the CPU time that this process (the orchestrator's side)
    spends on each status."""
    async with child(engines, Groups(num_workers, num_slots=32, step_s=1.0)) as scripted:
        members, clients = Membership(), Clients(SECRET)
        groups = [
            GenerationGroup(f"generate-{number}", f"127.0.0.1:{port}", "", 32, 2**20)
            for number, port in enumerate(scripted.greeting)
        ]
        members.update(ClusterView(generation=tuple(groups)))
        poller = WorkerPoller(members, clients, SystemClock())
        await poller.ask()  # connects
        begin_s = time.process_time()
        for _ in range(ROUNDS):
            await poller.ask()
        spent_s = time.process_time() - begin_s
        num_answers = sum(group.generation is not None for group in poller.groups())
        assert num_answers == num_workers, f"{num_answers} of {num_workers} workers answered"
        await clients.prune(())
    return "poll", f"a worker's status, of {num_workers}", 1e6 * spent_s / (ROUNDS * num_workers), "us"


def view_row(num_groups: int) -> Row:
    """Measure the CPU time to parse a view of the cluster that lists `num_groups` groups, half of them prefill groups
    and half generation groups."""
    half = num_groups // 2
    view = ClusterView(
        tuple(PrefillGroup(f"prefill-{each}", (f"node-{each}:1",), Epoch(0)) for each in range(half)),
        tuple(GenerationGroup(f"generate-{each}", f"node-{each}:2", "", 32, 2**20) for each in range(half)),
    )
    members, message = Membership(), view_to_proto(view)
    took_us = _each_us(lambda each: members.update(view_from_proto(each)), [message] * ROUNDS)
    return "view", f"a view of {num_groups} groups", took_us, "us"


def _place(number: int) -> tuple[str, tuple[str, ...]]:
    """Return the store of prompt `number`, and the names of its blocks."""
    names = PromptBlocks.of((number,) * (BLOCKS * 4), 4, "layout").names
    return STORES[number % len(STORES)], names


def _each_us(call: Callable[[T], object], arguments: Sequence[T]) -> float:
    """Return the mean processor time of a call, in microseconds."""
    begin_s = time.process_time()
    for argument in arguments:
        call(argument)
    return 1e6 * (time.process_time() - begin_s) / len(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
