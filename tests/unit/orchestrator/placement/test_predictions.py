"""What each way to serve a request is predicted to take, by hand: a token takes a rank 1 ms in ten layers, the last of
which only the last token passes; a step without prefill takes 20 ms.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.planning.cost_model import CostModel
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from baton.prefix_blocks import PromptBlocks
from baton.results.prefill_trace import Placement
from baton.sampling_params import SamplingParams
from baton.types import Epoch, FinishReason, JobId, Rank, RequestId, SampledToken, TokenEvent, TokenRange
from orchestrator.membership.members import Membership
from orchestrator.membership.prefill_queues import Pending
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.chooser import Chooser, Plan
from orchestrator.requests.config import Disaggregation, OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from tests.support.clusters.planners import deciding_planner, planner_of
from tests.support.manual_clock import ManualClock, StoppedClock

CHAIN = PrefillGroup("chain", ("h:1",), Epoch(1), prefix_store="ranks")
GROUP = GenerationGroup("group", "h:2", "layout", num_slots=8, max_slot_tokens=10_000, prefix_store="group")
CONFIG = OrchestratorConfig(block_tokens=32, prefill_wait_s=0.01)
PARAMS = SamplingParams(max_tokens=10)


def alone_s(num_tokens: int) -> float:
    """Of a prompt, on a rank."""
    return 9e-4 * num_tokens + 1e-4


def planner_with_memory() -> ChainPlanner:
    """Return a planner that knows how much memory a token's KV takes. The group computes faster than a rank."""
    cost = CostModel(10, linear_s=1e-4, pair_s=0.0, kv_bytes=8)
    return planner_of(cost, max_ranks=1, local=LocalPrefill(2.0, 256))


def request(num_tokens: int, params: SamplingParams = PARAMS, first: int = 0) -> RequestRecord:
    asked = Request(RequestId(f"r{first}"), tuple(range(first, first + num_tokens)), params)
    record = RequestRecord.of(asked, received_ns=0)
    record.admit(StoppedClock(1))
    return record


@dataclass
class Cluster:
    """A chain of one rank, and a generation group."""

    planner: ChainPlanner = field(default_factory=deciding_planner)
    config: OrchestratorConfig = CONFIG
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    members: Membership = field(default_factory=Membership)
    chooser: Chooser = field(init=False)

    def __post_init__(self) -> None:
        self.members.update(ClusterView((CHAIN,), (GROUP,)))
        self.chooser = Chooser(self.members, self.planner, self.clock, self.config)

    def see_token(self, record: RequestRecord) -> None:
        """The request's first, now."""
        record.accept(TokenEvent(0, SampledToken(5, 0.0, ()), "", self.clock.unix_ns(), None))
        record.see_token(self.clock.now_s())

    def busy(self, seconds: float) -> None:
        """The chain's rank has so much before it, due before all else."""
        job = Pending(0.0, 1e9, {Rank(0): seconds})
        self.members.prefill_queues.add(CHAIN.incarnation, JobId(1), job, self.clock.now_s())

    @contextlib.contextmanager
    def rows(self, num_rows: int) -> Iterator[None]:
        """So many rows are decoded."""
        with contextlib.ExitStack() as held:
            for _ in range(num_rows):
                held.enter_context(self.members.hold(GROUP.name, 1))
            yield

    async def place(self, record: RequestRecord) -> Placement:
        plan = await self.plan(record)
        assert plan.generation == GROUP
        assert plan.placement.is_local == (plan.chain is None)
        return plan.placement

    async def begin(self, record: RequestRecord, seconds: float) -> Placement:
        """Place a request, which then runs for so long."""
        placement = await self.place(record)
        record.place(self.clock)
        self.clock.advance(seconds)
        return placement

    async def plan(self, record: RequestRecord) -> Plan:
        with contextlib.ExitStack() as held:
            return await self.chooser.plan(record, held)

    def names(self, record: RequestRecord) -> tuple[str, ...]:
        """The request's blocks."""
        return PromptBlocks.of(record.request.prompt_ids, 32, GROUP.layout_fingerprint, "").names


async def test_an_idle_chain_as_fast_as_the_group_prefills() -> None:
    placement = await Cluster().place(request(100))
    assert placement.reason == "chain_faster"
    assert placement.chain is not None and placement.local is not None
    assert placement.chain.cost_s == placement.local.cost_s == pytest.approx(alone_s(100))


async def test_a_group_that_computes_faster_prefills() -> None:
    placement = await Cluster(deciding_planner(speed=2.0)).place(request(100))
    assert placement.reason == "local_faster"
    assert placement.local is not None and placement.local.cost_s == pytest.approx(alone_s(100) / 2)


async def test_the_crossover_is_where_the_predictions_cross() -> None:
    # Beside rows, a chunk of 16 tokens for every step of 20 ms: 100 tokens take seven, and half a step before.
    for queue_s, reason in ((0.139, "chain_faster"), (0.141, "local_faster")):
        cluster = Cluster()
        cluster.busy(queue_s)
        with cluster.rows(3):
            placement = await cluster.place(request(100))
        assert placement.reason == reason
        assert placement.local is not None and placement.chain is not None
        assert placement.local.prefill_s == pytest.approx(alone_s(100))
        assert placement.local.steps_s == pytest.approx(0.15)
        assert placement.chain.queue_s == pytest.approx(queue_s)
        assert placement.chain.steps_s == pytest.approx(0.01)


PLANNER = deciding_planner()


@settings(max_examples=50, deadline=None)
@given(num_tokens=st.integers(1, 4000), busy_s=st.floats(0, 5), num_rows=st.integers(0, 6), speed=st.floats(0.2, 5))
async def test_the_cheaper_way_is_taken(num_tokens: int, busy_s: float, num_rows: int, speed: float) -> None:
    PLANNER.local = LocalPrefill(speed, 256)
    cluster = Cluster(PLANNER)
    cluster.busy(busy_s)
    with cluster.rows(num_rows):
        placement = await cluster.place(request(num_tokens))
    assert placement.local is not None and placement.chain is not None
    assert placement.is_local == (placement.local.cost_s < placement.chain.cost_s)


async def test_what_is_cached_is_not_computed_and_not_pushed() -> None:
    cluster, record = Cluster(), request(100)
    names = cluster.names(record)
    cluster.chooser.context.prefixes.use("group", names)
    placement = await cluster.place(record)
    assert placement.reason == "local_faster"
    assert placement.local is not None
    assert placement.local.prefill_s == pytest.approx(alone_s(4))  # after 3 blocks of 32


@pytest.mark.parametrize(
    ("begun_s", "queue_s"),
    [(0.2, alone_s(1000) / 2 - 0.2), (10.0, alone_s(1000) / 2 / 4)],
    ids=["under way", "overdue, and so not done"],
)
async def test_a_prompt_waits_for_those_that_the_group_prefills_before_it(begun_s: float, queue_s: float) -> None:
    cluster = Cluster(deciding_planner(speed=2.0))
    first = request(1000)
    assert (await cluster.begin(first, begun_s)).is_local
    placement = await cluster.place(request(100, first=1))
    assert placement.local is not None and placement.local.queue_s == pytest.approx(queue_s)
    assert placement.reason == "chain_faster"
    cluster.see_token(first)
    again = await cluster.place(request(100, first=2))
    assert again.local is not None and again.local.queue_s == 0.0


async def test_a_group_that_is_slower_than_predicted_is_predicted_so() -> None:
    cluster = Cluster(deciding_planner(speed=2.0))
    record = request(100)
    await cluster.begin(record, 2 * alone_s(100))  # four times as long
    cluster.see_token(record)
    placement = await cluster.place(request(100, first=1))
    assert placement.local is not None and placement.local.prefill_s == pytest.approx(2 * alone_s(100))
    assert placement.reason == "chain_faster"


async def test_what_took_long_for_want_of_memory_teaches_nothing() -> None:
    planner = planner_with_memory()
    cluster = Cluster(planner, replace(CONFIG, disaggregation="never"))
    cluster.members.num_bytes_free["group"] = 0
    record = request(100)
    await cluster.begin(record, 30.0)
    cluster.see_token(record)
    await cluster.place(request(100, first=1))
    assert planner.alone_s(TokenRange(0, 100)) == sum(planner.rank_s((TokenRange(0, 100),))) / 2


async def test_a_group_without_memory_does_not_prefill_where_a_chain_can() -> None:
    planner = planner_with_memory()
    cluster = Cluster(planner)
    assert (await cluster.place(request(100))).reason == "local_faster"
    cluster.members.num_bytes_free["group"] = 100 * 80 - 1
    assert (await cluster.place(request(100, first=1))).reason == "not_predicted"


async def test_a_group_that_was_slow_is_tried_again_after_many_decisions() -> None:
    cluster = Cluster(deciding_planner(speed=2.0))
    cluster.planner.observe_local(TokenRange(0, 100), 3.0)
    record = request(100)
    assert (await cluster.place(record)).reason == "chain_faster"
    reasons = [(await cluster.place(record)).reason for _ in range(100)]
    assert reasons[-1] == "local_faster"


async def test_a_prompt_that_is_scored_is_computed_from_its_beginning() -> None:
    cluster, record = Cluster(), request(100, replace(PARAMS, prompt_logprobs=1))
    cluster.chooser.context.prefixes.use("group", cluster.names(record))
    placement = await cluster.place(record)
    assert placement.local is not None and placement.local.prefill_s == pytest.approx(alone_s(100))


async def test_an_attempt_that_has_ended_is_in_nobody_s_way() -> None:
    cluster = Cluster(deciding_planner(speed=2.0))
    record = request(1000)
    await cluster.place(record)
    record.finish(cluster.clock.unix_ns(), FinishReason.CANCELLED)
    placement = await cluster.place(request(100, first=1))
    assert placement.local is not None and placement.local.queue_s == 0.0


@pytest.mark.parametrize(("way", "speed", "reason"), [("always", 9.0, "always"), ("never", 0.1, "never")])
async def test_what_is_configured_is_not_compared(way: Disaggregation, speed: float, reason: str) -> None:
    cluster = Cluster(deciding_planner(speed), replace(CONFIG, disaggregation=way))
    assert (await cluster.place(request(100))).reason == reason


async def test_without_a_chain_the_group_prefills() -> None:
    cluster = Cluster()
    cluster.members.update(ClusterView((), (GROUP,)))
    assert (await cluster.place(request(100))).reason == "no_prefill_groups"
    cluster.members.update(ClusterView((replace(CHAIN, ready=False),), (GROUP,)))
    assert (await cluster.place(request(100))).reason == "none_ready"
    assert cluster.chooser.num_degraded == 1
    cluster.members.update(ClusterView((CHAIN,), (GROUP,)))
    scored = request(100, replace(PARAMS, prompt_logprobs=1))
    assert (await cluster.place(scored)).reason == "prompt_scores"


async def test_a_group_of_which_nothing_is_known_does_not_prefill() -> None:
    planner = deciding_planner(speed=9.0)
    planner.local = None
    placement = await Cluster(planner).place(request(100))
    assert (placement.reason, placement.local) == ("not_predicted", None)


async def test_a_request_goes_to_the_group_that_has_its_prefix() -> None:
    cluster, record = Cluster(), request(100)
    other = replace(GROUP, name="other", endpoint="h:3", prefix_store="other")
    cluster.members.update(ClusterView((CHAIN,), (GROUP, other)))
    cluster.chooser.context.prefixes.use("other", cluster.names(record))
    assert (await cluster.plan(record)).generation == other
    assert (await cluster.plan(request(100, first=500))).generation == GROUP


async def test_a_group_without_memory_for_a_request_is_asked_last() -> None:
    planner = planner_of(CostModel(10, linear_s=1e-4, pair_s=0.0, kv_bytes=8), max_ranks=1)
    cluster = Cluster(planner)
    other = replace(GROUP, name="other", endpoint="h:3", num_slots=4)
    cluster.members.update(ClusterView((CHAIN,), (GROUP, other)))
    assert (await cluster.plan(request(100))).generation == GROUP  # has more slots
    cluster.members.num_bytes_free["group"] = 100 * 80 - 1
    assert (await cluster.plan(request(100))).generation == other
    assert (await cluster.plan(request(99))).generation == GROUP


async def test_a_chain_that_is_not_ready_or_failed_the_request_is_not_planned_while_there_is_another() -> None:
    cluster, other = Cluster(), replace(CHAIN, name="other", endpoints=("h:4",))
    cluster.busy(5.0)
    cluster.members.update(ClusterView((CHAIN, other), (GROUP,)))
    assert await planned_chain(cluster, request(100)) == other  # has nothing before it
    cluster.members.update(ClusterView((CHAIN, replace(other, ready=False)), (GROUP,)))
    cluster.planner.local = None
    assert await planned_chain(cluster, request(100, first=1)) == CHAIN
    cluster.members.update(ClusterView((CHAIN, other), (GROUP,)))
    failed = request(100, first=2)
    failed.blame(other.incarnation)
    assert await planned_chain(cluster, failed) == CHAIN
    cluster.members.update(ClusterView((CHAIN, replace(other, epoch=Epoch(2))), (GROUP,)))
    assert (await planned_chain(cluster, failed)).incarnation == ("other", ("h:4",), 2)  # its next incarnation has not


async def planned_chain(cluster: Cluster, record: RequestRecord) -> PrefillGroup:
    plan = await cluster.plan(record)
    assert plan.chain is not None
    return plan.chain.group


async def test_only_the_chain_of_a_plan_is_planned_anew() -> None:
    cluster, other = Cluster(), replace(CHAIN, name="other", endpoints=("h:4",))
    cluster.members.update(ClusterView((CHAIN, other), (GROUP,)))
    record = request(100)
    plan = await cluster.plan(record)
    assert plan.chain is not None and plan.chain.group == CHAIN
    cluster.busy(5.0)
    again = cluster.chooser.replan(plan, record)
    assert again.chain is not None and again.chain.group == other
    assert replace(again, chain=plan.chain) == plan
    cluster.members.update(ClusterView((), (GROUP,)))
    assert cluster.chooser.replan(again, record) == again  # none is ready: the ranks that were chosen are asked


async def test_a_group_counts_as_taken_as_soon_as_it_is_planned_and_until_the_plan_is_given_up() -> None:
    cluster, record = Cluster(), request(100)
    cluster.members.update(ClusterView((replace(CHAIN, ready=False),), (replace(GROUP, num_slots=1),)))
    with contextlib.ExitStack() as held:
        waiting = asyncio.create_task(cluster.chooser.plan(record, held))
        await asyncio.sleep(0)
        assert cluster.members.load(GROUP.name).num_slots == 1  # while it waits for a chain
        assert not cluster.chooser.with_room(request(100, first=1), ())
        assert (await waiting).placement.reason == "none_ready"
        assert cluster.members.load(GROUP.name).num_slots == 1
    assert cluster.members.load(GROUP.name).num_slots == 0


async def test_a_group_that_refused_the_attempt_is_planned_again_only_where_no_other_has_room() -> None:
    cluster, other = Cluster(), replace(GROUP, name="other", endpoint="h:3", num_slots=4)
    cluster.members.update(ClusterView((CHAIN,), (GROUP, other)))
    with contextlib.ExitStack() as held:
        assert (await cluster.chooser.plan(request(100), held, full={GROUP.incarnation})).generation == other
    cluster.members.update(ClusterView((CHAIN,), (GROUP,)))
    cluster.chooser = Chooser(cluster.members, cluster.planner, cluster.clock, replace(CONFIG, avoid_s=0.01))
    with contextlib.ExitStack() as held:
        assert (await cluster.chooser.plan(request(100), held, full={GROUP.incarnation})).generation == GROUP


async def test_a_prompts_blocks_are_named_once_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, named, of = Cluster(), [], PromptBlocks.of

    def counting(token_ids: Sequence[int], block_tokens: int, layout: str, salt: str) -> PromptBlocks:
        named.append(layout)
        return of(token_ids, block_tokens, layout, salt)

    monkeypatch.setattr(PromptBlocks, "of", counting)
    other = replace(GROUP, name="other", endpoint="h:3", layout_fingerprint="other layout")
    cluster.members.update(ClusterView((CHAIN,), (GROUP, other)))
    record = request(100)
    plan = await cluster.plan(record)
    cluster.chooser.replan(plan, record)
    assert sorted(named) == ["layout", "other layout"]
