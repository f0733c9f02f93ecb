"""What does a placement cost, by number of groups, and what an autoscaler's decision?

`chooser` is the orchestrator's own choice (`orchestrator.placement.chooser`), which predicts every pair of an idle
prefill group and a generation group; `shortlist` is the traffic simulator's, which compares the groups that can win;
`autoscaler` is one decision in a budget of so many groups. Nominal costs of Llama-3.1-8B on H100s, half of the groups
of each role, idle; prompts of 1,500 tokens that were predicted before. Median milliseconds of a few calls here.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from baton.clock import SystemClock
from baton.ids import Epoch, RequestId
from baton.sampling_params import SamplingParams
from deploy.options.numbers import counts
from deploy.options.screen import number_table
from deploy.traffic.batch import StepLines
from deploy.traffic.events import Timeline
from deploy.traffic.fleet import Fleet, Role
from deploy.traffic.gaps import GapHistogram
from deploy.traffic.placing import Asked, Placing
from deploy.traffic.service import GroupSizes, RecallingPlanner
from orchestrator.autoscaling.actions import FleetState, LeadTimes
from orchestrator.autoscaling.autoscaler import Autoscaler
from orchestrator.autoscaling.demand import Backlog, ServiceModel
from orchestrator.autoscaling.prediction import Allocation
from orchestrator.membership.members import Members
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.chain_width import WidthPolicy
from orchestrator.placement.chooser import Chooser
from orchestrator.requests.config import AutoscalingConfig, OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from planning.calibration import nominal
from planning.hardware import hardware_of
from planning.model_shape import shape_of
from planning.step_times import nominal_steps

PROMPT = 1500
MOST_FOR_CHOOSER = 200
"""Groups beyond which the chooser is not asked: its time grows with their square."""


def main() -> int:
    """Print the table; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--groups", default="4,20,100,1000,10000", metavar="N,...", help="groups (default: %(default)s)"
    )
    parser.add_argument("--calls", default=9, type=int, metavar="N", help="calls of each kind (default: %(default)s)")
    args = parser.parse_args()
    shape, rates = shape_of("llama-3.1-8b"), hardware_of("h100-flash")
    steps = nominal_steps("llama-3.1-8b", "h100-flash", shape, rates)
    planner = RecallingPlanner(nominal("llama-3.1-8b", "", shape, rates), max_ranks=1, max_tokens=8192, steps=steps)
    table = number_table("milliseconds a decision", ["groups", "chooser", "shortlist", "autoscaler"])
    for num_groups in counts("--groups", args.groups, 20_000, least=2):
        chooser = chooser_ms(planner, num_groups, args.calls) if num_groups <= MOST_FOR_CHOOSER else float("nan")
        cells = (chooser, shortlist_ms(planner, num_groups, args.calls), autoscaler_ms(planner, num_groups, args.calls))
        print(num_groups, *(f"{cell:.3f}" for cell in cells), flush=True)
        table.add_row(str(num_groups), *(f"{cell:.3f}" for cell in cells))
    return 0


def chooser_ms(planner: RecallingPlanner, num_groups: int, num_calls: int) -> float:
    """Return the milliseconds of one choice of the orchestrator."""
    members, half = Members(), num_groups // 2
    members.update(
        ClusterView(
            tuple(PrefillGroup(f"prefill-{each}", (f"node-{each}:1",), Epoch(0)) for each in range(half)),
            tuple(GenerationGroup(f"generate-{each}", f"node-{each}:2", "", 32, 2**20) for each in range(half)),
        )
    )
    chooser = Chooser(members, planner, SystemClock(), OrchestratorConfig())
    request = Request(RequestId("asked"), tuple(range(PROMPT)), SamplingParams(max_tokens=200))

    async def choose() -> list[float]:
        times = []
        for _ in range(num_calls + 1):
            with ExitStack() as held:
                begin_s = time.perf_counter()
                await chooser.plan(RequestRecord.of(request, 1), held)
                times.append(time.perf_counter() - begin_s)
        return times[1:]

    return 1e3 * statistics.median(asyncio.run(choose()))


def shortlist_ms(planner: RecallingPlanner, num_groups: int, num_calls: int) -> float:
    """Return the milliseconds of one choice of the simulator."""
    assert planner.steps is not None
    timeline = Timeline()
    fleet = Fleet(GroupSizes(), StepLines(planner.steps), timeline, GapHistogram())
    for role in Role:
        for _ in range(num_groups // 2):
            fleet.start(role, after_s=0.0)
    placing = Placing(fleet, planner, WidthPolicy(planner, elastic=True, overtaking=0.15), timeline)
    return _median_ms(lambda: placing.place(Asked(0, PROMPT, 200)), range(num_calls))


def autoscaler_ms(planner: RecallingPlanner, num_groups: int, num_calls: int) -> float:
    """Return the milliseconds of one decision in a budget of so many groups, all of which are needed."""
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
