"""The chooser prices each group once, and chooses as if it had predicted every pair of groups."""

import math
import random
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import DrainedError
from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.device_profile import DeviceProfile
from baton.planning.hardware import Hardware
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from baton.planning.work_cost import WorkCost
from baton.prefix_blocks import PromptBlocks
from baton.sampling_params import SamplingParams
from baton.types import Epoch, JobId, Rank, RequestId
from baton_lab.traffic.choosing import plan_now
from orchestrator.membership.breakers import Breakers
from orchestrator.membership.members import Membership
from orchestrator.membership.prefill_queues import Pending
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.block_fetches import BlockFetch
from orchestrator.placement.chooser import Chooser, NoGroupError, Plan
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import Attempt, RequestRecord
from orchestrator.requests.request import Request
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant
from tests.support.all_pairs import AllPairs, PairWay, cost_s
from tests.support.clusters.planners import planner_of
from tests.support.manual_clock import ManualClock, StoppedClock

BLOCK = 16
LAYOUTS = ("old", "old", "old", "new")
NODES = ("n0", "n1", "n2", "n3")
PROMPT = tuple(range(200))
LINK = LinkModel(2.3e-3, 2e7)
STEP = WorkCost(0.0113, 3e-4, 1.3e-6, 0.0)
KV_BYTES = 259
"""Of a token, in all layers."""
PROFILES = (
    *(None, None),
    *(DeviceProfile(f"{rate:g} FLOP/s", "cpu", Hardware(rate, rate / 2, LINK), 1e10) for rate in (7e4, 3e5)),
)
CONFIG = OrchestratorConfig(block_tokens=BLOCK, prefill_wait_s=1e-4, generation_wait_s=1e-4, avoid_s=1e-4)


def planner(bandwidth: float, local: LocalPrefill | None) -> ChainPlanner:
    """With a link that slow; a rank computes the whole prompt in 150 ms."""
    link = LinkModel(2.3e-3, bandwidth)
    cost = CostModel(
        7, linear_s=3.3e-5 * math.pi, pair_s=5.4e-9 * math.pi, kv_bytes=KV_BYTES // 7, head_s=3e-4, link=link
    )
    return planner_of(cost, max_ranks=4, max_tokens=256, step=STEP, local=local)


PLANNERS = [(speed, local) for speed in (2e7, 4.7e5, 2.9e5) for local in (None, LocalPrefill(0.61, 64))]


@dataclass
class Cluster:
    """A cluster at random: groups of both roles on few nodes, some drained, broken or not ready, with jobs and rows;
    stores that hold parts of the prompt."""

    rng: random.Random
    num_groups: int
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    members: Membership = field(init=False)
    chooser: Chooser = field(init=False)

    def __post_init__(self) -> None:
        self.members = Membership(Breakers(self.clock, 1))
        prefill = tuple(self._prefill(number) for number in range(self.rng.randint(0, 2 * self.num_groups)))
        generation = tuple(self._generation(number) for number in range(self.rng.randint(1, self.num_groups)))
        self.members.update(ClusterView(prefill, generation))
        self.chooser = Chooser(self.members, planner(*self.rng.choice(PLANNERS)), self.clock, CONFIG)
        for each in prefill:
            self._busy(each)
        for group in self.members.present.groups:
            self._hold_back(group.name)
            if group.prefix_store:
                names = PromptBlocks.of(PROMPT, BLOCK, self.rng.choice(LAYOUTS)).names
                self.chooser.context.prefixes.use(
                    group.prefix_store, names[: self.rng.choice((0, 0, 1, 4, 9, len(names)))]
                )

    def serve(self, held: ExitStack) -> None:
        """Give groups a few requests, each where the chooser wants it."""
        for number in range(self.rng.randint(0, self.num_groups)):
            record = asked(self.rng, f"r{number}")
            plan = plan_now(self.chooser, record, held)
            if plan is not None:
                record.place(self.clock, Attempt(placement=plan.placement))
                if plan.chain is not None:
                    job = plan.chain.plan.job
                    self.members.prefill_queues.add(
                        plan.chain.group.incarnation, JobId(number), job, self.clock.now_s()
                    )
            self.clock.advance(self.rng.choice((0.0, 0.001, 0.0173)))

    def _prefill(self, number: int) -> PrefillGroup:
        rng, num_ranks = self.rng, self.rng.choice((1, 1, 1, 4))
        nodes = [rng.choice(NODES)] * num_ranks if rng.random() < 0.7 else [rng.choice(NODES) for _ in range(num_ranks)]
        endpoints = tuple(f"{node}:{100 + 10 * number + rank}" for rank, node in enumerate(nodes))
        return PrefillGroup(
            f"prefill-{number}",
            endpoints,
            Epoch(1),
            ready=rng.random() < 0.9,
            prefix_store=rng.choice(("", f"store-{nodes[0]}", f"own-{number}")),
            layout_fingerprint=rng.choice(("", *LAYOUTS)),
            profile=rng.choice(PROFILES),
        )

    def _generation(self, number: int) -> GenerationGroup:
        rng, node = self.rng, self.rng.choice(NODES)
        return GenerationGroup(
            f"generate-{number}",
            f"{node}:{900 + number}",
            rng.choice(LAYOUTS),
            num_slots=rng.choice((2, 8, 8)),
            max_slot_tokens=rng.choice((150, 400, 400, 400, 400)),
            ready=rng.random() < 0.9,
            prefix_store=rng.choice(("", f"store-{node}", f"slots-{number}")),
            is_approximate=rng.random() < 0.3,
            profile=rng.choice(PROFILES),
        )

    def _busy(self, group: PrefillGroup) -> None:
        for number in range(self.rng.choice((0, 0, 0, 1, 3))):
            ranks = self.rng.sample(range(len(group.endpoints)), self.rng.randint(1, len(group.endpoints)))
            left_s = {Rank(rank): self.rng.choice((0.0, 0.004, 0.0271)) for rank in sorted(ranks)}
            due_s = 1000.0 + self.rng.choice((-1.0, 0.005, 9.0))
            tenant = self.rng.choice((DEFAULT_TENANT, Tenant("other")))
            job = Pending(due_s, due_s + self.rng.choice((0.0, 0.01, 1.0)), left_s, tenant)
            self.members.prefill_queues.add(group.incarnation, JobId(1000 + number), job, 1000.0)

    def _hold_back(self, name: str) -> None:
        chance = self.rng.random()
        if chance < 0.1:
            self.members.drain(name)
        elif chance < 0.2:
            incarnation = next(group.incarnation for group in self.members.present.groups if group.name == name)
            self.members.breakers.failed(incarnation)
        elif chance < 0.3:
            self.members.num_bytes_free[name] = self.rng.randint(0, 2 * len(PROMPT) * KV_BYTES)


def asked(rng: random.Random, name: str = "asked") -> RequestRecord:
    params = SamplingParams(
        max_tokens=10, n=rng.choice((1, 1, 1, 2)), prompt_logprobs=1 if rng.random() < 0.05 else None
    )
    prompt = PROMPT[: rng.choice((5, 90, len(PROMPT), len(PROMPT)))]
    exact, by_chain = rng.random() < 0.2, rng.random() < 0.3
    request = Request(RequestId(name), prompt, params, exact=exact, by_chain=by_chain)
    record = RequestRecord.of(request, received_ns=0)
    record.admit(StoppedClock(1))
    return record


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), num_groups=st.integers(1, 7))
async def test_the_choice_is_that_among_all_pairs(seed: int, num_groups: int) -> None:
    await check(random.Random(seed), num_groups)


@pytest.mark.ci
@settings(max_examples=2000)
@given(seed=st.integers(0, 2**32), num_groups=st.integers(1, 12))
async def test_the_choice_is_that_among_all_pairs_of_more_clusters(seed: int, num_groups: int) -> None:
    await check(random.Random(seed), num_groups)


async def check(rng: random.Random, num_groups: int) -> None:
    """Choose once, by the chooser and among all pairs."""
    cluster = Cluster(rng, num_groups)
    with ExitStack() as held:
        cluster.serve(held)
        record = asked(rng)
        for group in cluster.members.present.groups:
            if rng.random() < 0.1:
                record.blame(group.incarnation)
        pairs = AllPairs(cluster.chooser.context, record)
        generation = pairs.generation(record.avoid) or pairs.generation()
        if generation is None:
            with pytest.raises((NoGroupError, DrainedError)):
                await cluster.chooser.plan(record, held)
            return
        chains, local = pairs.chains(generation), pairs.local(generation)
        lacks_memory = pairs.lacks_memory(generation)
        plan = await cluster.chooser.plan(record, held)
        assert plan.generation == generation
        chains = [way for way in chains if way.group and way.group.incarnation not in record.avoid] or chains
        if record.wants_prompt_scores or not chains:
            assert plan.chain is None
        else:
            known = None if lacks_memory or record.request.by_chain else local
            check_way(plan, chains, known)
        if plan.chain is None and not record.wants_prompt_scores:
            check_fetch(plan.fetch, None if local is None else local.fetch)
            if local and local.fetch and plan.fetch:
                assert plan.fetch.saved_s == pytest.approx(local.fetch.saved_s)


def check_way(plan: Plan, chains: list[PairWay], local: PairWay | None) -> None:
    """The plan is the cheapest of these ways; `local` is None where that is not compared."""
    best = min(chains, key=cost_s)
    if local is not None and cost_s(local) != cost_s(best):
        assert plan.placement.is_local == (cost_s(local) < cost_s(best))
    if plan.chain is not None:
        terms = plan.placement.chain
        assert (plan.chain.group, plan.chain.plan, terms) == (best.group, best.chain, best.terms)
        check_fetch(plan.fetch, best.fetch)


def check_fetch(fetch: BlockFetch | None, wanted: BlockFetch | None) -> None:
    """The fetch is the wanted one, and is predicted to save time."""
    if fetch is None or wanted is None:
        assert fetch is wanted
        return
    assert replace(fetch, saved_s=wanted.saved_s) == wanted
    assert fetch.predicted_s < fetch.saved_s <= wanted.saved_s + 1e-9  # the best chain that computes may be another


@pytest.mark.parametrize("num_cached", [192, 0], ids=["little to push", "all to push"])
async def test_which_chain_is_cheapest_depends_on_how_much_kv_it_pushes(num_cached: int) -> None:
    slow = planner(3e5, None)  # the whole prompt's KV takes 0.17 s, a 150 ms chain hides most of that
    clock, members = ManualClock(1000.0), Membership()
    chooser = Chooser(members, slow, clock, replace(CONFIG, prefill_wait_s=1.0))
    short, whole = (PrefillGroup(name, ("n0:1",), Epoch(1), prefix_store=name) for name in ("short", "whole"))
    group = GenerationGroup("group", "n1:2", "layout", 8, 400, prefix_store="group")
    members.update(ClusterView((short, whole), (group,)))
    members.prefill_queues.add(short.incarnation, JobId(1), Pending(0.0, 1e9, {Rank(0): 0.1}), 1000.0)
    names = PromptBlocks.of(PROMPT, BLOCK, "layout").names
    chooser.context.prefixes.use("short", names[: 192 // BLOCK])
    chooser.context.prefixes.use("group", names[: num_cached // BLOCK])
    with ExitStack() as held:
        plan = await chooser.plan(asked_for(PROMPT), held, reuse="node")
    assert plan.chain is not None and plan.chain.group == (short if num_cached else whole)


def asked_for(prompt: tuple[int, ...]) -> RequestRecord:
    record = RequestRecord.of(Request(RequestId("asked"), prompt, SamplingParams(max_tokens=10)), received_ns=0)
    record.admit(StoppedClock(1))
    return record
