"""When cached KV is fetched from another node, and from which, by hand: a token takes 1 ms to compute, and 0.1 ms on
the link, which takes a millisecond each way.
"""

import contextlib
from dataclasses import dataclass, field, replace

import pytest

from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from baton.prefix_blocks import PromptBlocks
from baton.sampling_params import SamplingParams
from baton.types import Epoch, JobId, Rank, RequestId
from orchestrator.membership.members import Membership
from orchestrator.membership.prefill_queues import Pending
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.block_fetches import BlockFetch
from orchestrator.placement.chooser import Chooser, Plan
from orchestrator.placement.options import Reuse
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from tests.support.clusters.planners import planner_of
from tests.support.manual_clock import ManualClock, StoppedClock

HERE = GenerationGroup("here", "h:1", "layout", num_slots=8, max_slot_tokens=10_000, prefix_store="here")
FAR = replace(HERE, name="far", endpoint="f:1", num_slots=0, prefix_store="far")
"""Full."""
NEAR = replace(FAR, name="near", endpoint="h:2", prefix_store="near")
CHAIN = PrefillGroup("chain", ("c:1",), Epoch(1), prefix_store="chain")
LOCAL = OrchestratorConfig(block_tokens=32, prefill_wait_s=0.01, disaggregation="never")
PARAMS = SamplingParams(max_tokens=10)
FETCH_S = 0.004 + 2 * 0.001 + 96 * 1e-4
"""Of three blocks from another node."""


def alone_s(num_tokens: int) -> float:
    """Of a prompt."""
    return 9e-4 * num_tokens + 1e-4


def planner(bandwidth: float = 1e7) -> ChainPlanner:
    cost = CostModel(10, linear_s=1e-4, pair_s=0.0, kv_bytes=100, project_share=0.0, link=LinkModel(0.001, bandwidth))
    return planner_of(cost, max_ranks=1, local=LocalPrefill(1.0, 256))


def request(params: SamplingParams = PARAMS) -> RequestRecord:
    """Of 100 tokens: three whole blocks, and four tokens."""
    record = RequestRecord.of(Request(RequestId("r"), tuple(range(100)), params), received_ns=0)
    record.admit(StoppedClock(1))
    return record


NAMES = PromptBlocks.of(tuple(range(100)), 32, "layout").names


@dataclass
class Cluster:
    """Groups, and what the index says of their stores."""

    held: dict[str, int]
    """Blocks of the request in each store."""
    groups: tuple[GenerationGroup, ...] = (HERE, FAR)
    planner: ChainPlanner = field(default_factory=planner)
    config: OrchestratorConfig = LOCAL
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    members: Membership = field(default_factory=Membership)
    chooser: Chooser = field(init=False)

    def __post_init__(self) -> None:
        self.members.update(ClusterView((CHAIN,), self.groups))
        self.chooser = Chooser(self.members, self.planner, self.clock, self.config)
        for store, number in self.held.items():
            self.chooser.context.prefixes.use(store, NAMES[:number])

    async def plan(self, record: RequestRecord | None = None, *, reuse: Reuse = "cluster") -> Plan:
        with contextlib.ExitStack() as held:
            plan = await self.chooser.plan(record or request(), held, reuse=reuse)
        assert plan.generation == HERE
        return plan

    async def fetch(self) -> BlockFetch:
        """Return the fetch that is planned."""
        fetch = (await self.plan()).fetch
        assert fetch is not None
        return fetch


async def test_what_another_node_has_is_fetched_where_that_is_faster_than_computing() -> None:
    plan = await Cluster({"far": 3}).plan()
    fetch, local = plan.fetch, plan.placement.local
    assert fetch is not None and local is not None
    assert (fetch.source.endpoint, fetch.target.endpoint, fetch.names, fetch.num_held) == ("f:1", "h:1", NAMES[:3], 0)
    assert fetch.predicted_s == local.fetch_s == pytest.approx(FETCH_S)
    assert local.prefill_s == pytest.approx(alone_s(4))
    assert local.own_s == pytest.approx(FETCH_S + alone_s(4))
    assert plan.reserves


async def test_a_fetch_gets_as_long_as_computing_would_take() -> None:
    assert (await Cluster({"far": 3}).fetch()).within_s == pytest.approx(alone_s(100) - alone_s(4))
    short = await Cluster({"far": 1}).fetch()
    assert short.saved_s == pytest.approx(alone_s(100) - alone_s(68))
    assert short.within_s == 0.05


@pytest.mark.parametrize(("bandwidth", "is_fetched"), [(1.19e6, False), (1.2e6, True)])
async def test_the_crossover_is_where_the_predictions_cross(bandwidth: float, is_fetched: bool) -> None:
    # 96 tokens save 86.4 ms, of which 6 go besides the 96,000 bytes
    plan = await Cluster({"far": 3}, planner=planner(bandwidth)).plan()
    assert (plan.fetch is not None) == is_fetched


async def test_only_what_is_missing_is_fetched() -> None:
    fetch = await Cluster({"far": 3, "here": 1}).fetch()
    assert (fetch.num_held, fetch.names) == (1, NAMES[:3])
    assert fetch.predicted_s == pytest.approx(0.006 + 64e-4)
    assert (await Cluster({"far": 2, "here": 2}).plan()).fetch is None


async def test_the_store_with_most_blocks_is_asked_and_of_equals_one_on_the_same_host() -> None:
    groups = (HERE, FAR, NEAR)
    for held, source in (
        ({"far": 3, "near": 2}, "far"),
        ({"far": 2, "near": 3}, "near"),
        ({"far": 3, "near": 3}, "near"),
    ):
        fetch = await Cluster(held, groups).fetch()
        assert (fetch.source.store, fetch.is_far) == (source, source == "far")


async def test_after_a_failure_another_store_is_asked_for_a_while() -> None:
    cluster = Cluster({"far": 3, "near": 2}, (HERE, FAR, NEAR))
    cluster.chooser.context.sources.failed(await cluster.fetch())
    second = await cluster.fetch()
    assert second.source.store == "near"
    cluster.chooser.context.sources.failed(second)
    assert (await cluster.plan()).fetch is None
    cluster.clock.advance(1.01)
    assert (await cluster.fetch()).source.store == "far"


async def test_a_pause_ends_with_a_fetch_that_goes_well_and_grows_with_one_that_does_not() -> None:
    cluster = Cluster({"far": 3})
    sources, fetch = cluster.chooser.context.sources, await cluster.fetch()
    sources.failed(fetch)
    cluster.clock.advance(1.01)
    assert sources.pauses.of(fetch.pair).began()
    assert (await cluster.plan()).fetch is None  # nobody joins the first one after a pause
    sources.failed(fetch)
    cluster.clock.advance(1.01)
    assert (await cluster.plan()).fetch is None
    cluster.clock.advance(1.0)
    sources.pauses.of(fetch.pair).succeeded(is_probe=sources.pauses.of(fetch.pair).began())
    assert (await cluster.plan()).fetch is not None


async def test_a_store_that_is_gone_has_no_pause() -> None:
    cluster = Cluster({"far": 3, "near": 3}, (HERE, FAR, NEAR))
    fetch = await cluster.fetch()
    assert fetch.source.store == "near"
    cluster.chooser.context.sources.failed(fetch)
    cluster.members.update(ClusterView((CHAIN,), (HERE, FAR)))
    other = await cluster.fetch()
    assert other.source.store == "far"
    cluster.chooser.context.sources.failed(other)
    assert cluster.chooser.context.sources._failed == {other.pair}


async def test_drained_groups_are_asked_and_those_that_are_not_ready_are_not() -> None:
    cluster = Cluster({"far": 3})
    cluster.members.drain("far")
    assert (await cluster.plan()).fetch is not None
    cluster.members.update(ClusterView((CHAIN,), (HERE, replace(FAR, ready=False))))
    assert (await cluster.plan()).fetch is None


async def test_no_fetch_without_use_for_it() -> None:
    cluster = Cluster({"far": 3})
    assert (await cluster.plan(request(replace(PARAMS, prompt_logprobs=1)))).fetch is None
    assert (await cluster.plan(reuse="none")).fetch is None
    assert (await cluster.plan(reuse="node")).fetch is None
    cluster.planner.local = None  # nothing is known of computing
    assert (await cluster.plan()).fetch is None


async def test_a_chain_begins_behind_what_its_node_fetches_from_the_group_that_generates() -> None:
    cluster = Cluster({"here": 3}, config=replace(LOCAL, disaggregation="always"))
    record = request()
    plan = await cluster.plan(record)
    assert plan.fetch is not None and plan.chain is not None and plan.placement.chain is not None
    assert (plan.fetch.source.store, plan.fetch.target.endpoint) == ("here", "c:1")
    assert plan.chain.plan.num_cached_tokens == 96
    assert plan.placement.chain.fetch_s == pytest.approx(FETCH_S)
    failed = cluster.chooser.replan(plan, record)
    assert failed.chain is not None and failed.chain.plan.num_cached_tokens == 0
    cluster.chooser.context.prefixes.use("chain", plan.fetch.names)
    fetched = cluster.chooser.replan(plan, record)
    assert fetched.chain is not None and fetched.chain.plan.num_cached_tokens == 96


async def test_others_are_served_during_a_fetch() -> None:
    for queue_s, left_s in ((0.005, 0.0), (1.0, 1.0 - FETCH_S)):
        cluster = Cluster({"far": 3}, config=replace(LOCAL, disaggregation="always"))
        job = Pending(0.0, 1e9, {Rank(0): queue_s})
        cluster.members.prefill_queues.add(CHAIN.incarnation, JobId(1), job, cluster.clock.now_s())
        chain = (await cluster.plan()).placement.chain
        assert chain is not None and chain.queue_s == pytest.approx(left_s)


async def test_a_link_that_was_slow_is_tried_again_after_many_decisions() -> None:
    cluster = Cluster({"far": 3})
    cluster.planner.observe_fetch(96_000, 30.0, is_far=True)
    assert (await cluster.plan()).fetch is None
    found = [(await cluster.plan()).fetch for _ in range(64)]
    assert found[0] is None and found[-1] is not None
