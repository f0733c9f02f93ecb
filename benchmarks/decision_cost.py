"""Measures how long the orchestrator takes to place a request, and how long the autoscaler takes to decide, for
different numbers of groups.

    idle        placement of a prompt of 1,500 tokens by the orchestrator (`orchestrator.placement.chooser`). No group
                has work, and no prefix store has a block
    busy        the same placement when each prefill group has two queued jobs, and each generation group has 8 to 12
                sequences and its own prefix store. The stores of an eighth of the groups have one to five of the
                prompt's blocks. All other groups may fetch these blocks, and generation groups may prefill locally
    shortlist   placement in the traffic simulator, which compares only a few candidate groups
    autoscaler  one decision of the autoscaler, whose maximum number of groups is the number in the first column

The planner uses nominal costs of Llama-3.1-8B on H100s. Half of the groups are prefill groups, half are generation
groups. Values are median milliseconds of a few calls on this machine.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from baton.planning.hardware import ModelCosts
from baton.planning.local_prefill import LocalPrefill
from baton.prefix_blocks import PromptBlocks
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.types import Epoch, JobId, Rank, RequestId
from baton_lab.study.known_hardware import hardware_of
from baton_lab.study.known_models import shape_of
from baton_lab.traffic.events import Timeline
from baton_lab.traffic.fleet import Fleet, Role
from baton_lab.traffic.gaps import GapHistogram
from baton_lab.traffic.placing import Asked, Placing
from baton_lab.traffic.service import GroupSizes, RecallingPlanner
from deploy.options.numbers import counts
from deploy.options.screen import number_table
from orchestrator.autoscaling.actions import FleetState, LeadTimes
from orchestrator.autoscaling.autoscaler import Autoscaler
from orchestrator.autoscaling.demand import Backlog, ServiceModel
from orchestrator.autoscaling.prediction import Allocation
from orchestrator.membership.members import Membership
from orchestrator.membership.prefill_queues import Pending
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.chooser import Chooser
from orchestrator.requests.config import AutoscalingConfig, OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request

PROMPT = 1500


def main() -> int:
    """Run the measurements and print the table. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--groups", default="4,20,100,1000,10000", metavar="N,...", help="numbers of groups (default: %(default)s)"
    )
    parser.add_argument(
        "--calls", default=9, type=int, metavar="N", help="number of calls of each kind (default: %(default)s)"
    )
    args = parser.parse_args()
    planner = planner_here(None)
    table = number_table("milliseconds a decision", ["groups", "idle", "busy", "shortlist", "autoscaler"])
    for num_groups in counts("--groups", args.groups, 20_000, least=2):
        cells = (
            chooser_ms(planner, num_groups, args.calls, is_busy=False),
            chooser_ms(planner_here(LocalPrefill(0.7, 256)), num_groups, args.calls, is_busy=True),
            shortlist_ms(planner, num_groups, args.calls),
            autoscaler_ms(planner, num_groups, args.calls),
        )
        print(num_groups, *(f"{cell:.3f}" for cell in cells), flush=True)
        table.add_row(str(num_groups), *(f"{cell:.3f}" for cell in cells))
    return 0


def planner_here(local: LocalPrefill | None) -> RecallingPlanner:
    """Return a planner with nominal costs. `local`: speed of prefill by generation groups; None if they do not
    prefill."""
    costs = ModelCosts.of(shape_of("llama-3.1-8b"), hardware_of("h100-flash"))
    planner = RecallingPlanner(costs, max_ranks=1, max_tokens=8192)
    planner.local = local
    return planner


def chooser_ms(planner: RecallingPlanner, num_groups: int, num_calls: int, *, is_busy: bool) -> float:
    """Return the median milliseconds of one placement by the orchestrator, with `num_groups` groups. `is_busy`: True if
    the groups have work and their prefix stores have blocks."""
    members, half, clock = Membership(), num_groups // 2, SystemClock()
    stores = [f"store-{each}" if is_busy else "" for each in range(half)]
    members.update(
        ClusterView(
            tuple(
                PrefillGroup(f"prefill-{each}", (f"node-{each}:1",), Epoch(0), prefix_store=store)
                for each, store in enumerate(stores)
            ),
            tuple(
                GenerationGroup(f"generate-{each}", f"node-{each}:2", "", 32, 2**20, prefix_store=store)
                for each, store in enumerate(stores)
            ),
        )
    )
    chooser = Chooser(members, planner, clock, OrchestratorConfig())
    request = Request(RequestId("asked"), tuple(range(PROMPT)), SamplingParams(max_tokens=200))

    async def choose() -> list[float]:
        times = []
        for _ in range(num_calls + 1):
            with ExitStack() as held:
                begin_s = time.perf_counter()
                await chooser.plan(RequestRecord.of(request, 1), held)
                times.append(time.perf_counter() - begin_s)
        return times[1:]

    with ExitStack() as work:
        if is_busy:
            _busy(chooser, members, work)
        return 1e3 * statistics.median(asyncio.run(choose()))


def _busy(chooser: Chooser, members: Membership, work: ExitStack) -> None:
    """Give work to all groups, and the first blocks of the prompt to an eighth of the stores."""
    clock = SystemClock()
    now_s, num_groups = clock.now_s(), len(members.present.prefill)
    blocks = PromptBlocks.of(tuple(range(PROMPT)), OrchestratorConfig().block_tokens, "")
    for number in range(0, num_groups, max(num_groups // 8, 1)):
        chooser.context.prefixes.use(members.present.prefill[number].prefix_store, blocks.names[: 1 + number % 5])
    for number, group in enumerate(members.present.prefill):
        for job in range(2):
            left_s = {Rank(0): 60.0 + 0.001 * ((7 * number + 3 * job) % 50)}
            members.prefill_queues.add(
                group.incarnation, JobId(job), Pending(now_s + job, now_s + 600.0, left_s), now_s
            )
    for number, row in ((each, row) for each in range(num_groups) for row in range(8 + each % 5)):
        prompt = (number, *range(100 + (70 * number + 50 * row) % 900))
        record = RequestRecord.of(Request(RequestId(f"{number}.{row}"), prompt, SamplingParams(max_tokens=200)), 1)
        record.admit(clock)
        record.place(clock)
        generation = members.present.generation[number]
        work.enter_context(members.hold(generation.name, 1))
        chooser.context.generation_load.place(record, generation.incarnation, chooser.context.planner_of(generation))


def shortlist_ms(planner: RecallingPlanner, num_groups: int, num_calls: int) -> float:
    """Return the median milliseconds of one placement in the traffic simulator, with `num_groups` groups."""
    timeline = Timeline()
    fleet = Fleet(GroupSizes(), planner.nominal, timeline, GapHistogram())
    for role in Role:
        for _ in range(num_groups // 2):
            fleet.start(role, after_s=0.0)
    placing = Placing(fleet, planner, OrchestratorConfig(), timeline)
    return _median_ms(lambda: placing.place(Asked(0, PROMPT, 200)), range(num_calls))


def autoscaler_ms(planner: RecallingPlanner, num_groups: int, num_calls: int) -> float:
    """Return the median milliseconds of one decision of the autoscaler. It may run at most `num_groups` groups, and the
    load is so high that all of them are needed."""
    half = num_groups // 2
    config = AutoscalingConfig(min=2, max=num_groups)
    autoscaler = Autoscaler(config, ServiceModel(planner, 1, 32), LeadTimes(30.0, 2.0))
    for number in range(60 * 5 * half):
        autoscaler.window.arrived(number / (5 * half), PROMPT)
    state = FleetState(Allocation(half, num_groups - half), Backlog())
    return _median_ms(lambda: autoscaler.decide(60.0, state), range(num_calls))


def _median_ms(call: Callable[[], object], numbers: Iterable[int]) -> float:
    call()
    times = []
    for _ in numbers:
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    raise SystemExit(main())
