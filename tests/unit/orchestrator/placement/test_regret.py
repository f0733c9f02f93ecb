"""Regret of placement among groups of different devices.

The chooser knows nominal rates and what 20 finished requests have taught it. The truth draws each rate of each kind of
device at 0.5 to 2 times nominal, and adds what the model lacks: a launch time of each layer, and links that are shared.
The regret of a choice is its true time, own and delay of others, divided by that of the best option.
"""

import random
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from baton.planning.chain.partition_table import PartitionTable
from baton.planning.cost_model import LinkModel
from baton.planning.device_profile import DeviceProfile
from baton.planning.gpus import gpu_rank
from baton.planning.hardware import Hardware, ModelCosts, cpu_rank
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from baton.planning.step_cost import LearntCosts
from baton.prefix_blocks import PromptBlocks
from baton.results.prefill_trace import RankTiming
from baton.sampling_params import SamplingParams
from baton.types import Epoch, JobId, RequestId, TokenRange
from baton_lab.study.known_models import shape_of
from baton_lab.study.terms import local_terms
from baton_lab.traffic.choosing import plan_now
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, G, GenerationGroup, Group, PrefillGroup
from orchestrator.placement.block_fetches import node_of
from orchestrator.placement.chain_width import ChainPlan, PromptChains, finishes_s
from orchestrator.placement.chooser import Chooser, Plan
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from tests.support.all_pairs import AllPairs
from tests.support.manual_clock import ManualClock, StoppedClock

SEED = 20261129
NUM_CASES = 200
NUM_TAUGHT = 20
SHAPE = shape_of("llama-3.1-8b")
BLOCK = 128
NOMINAL = {
    "H200": gpu_rank("NVIDIA H200", 2),
    "H100": gpu_rank("NVIDIA H100 80GB HBM3", 2),
    "L4": gpu_rank("NVIDIA L4", 2),
    "CPU": cpu_rank(16, 2),
}
LOCAL = LocalPrefill(1.0, 2048, 0.3)
CONFIG = OrchestratorConfig(block_tokens=BLOCK)


def planner_of(hardware: Hardware, name: str, table: PartitionTable | None = None) -> ChainPlanner:
    """The planner of a cluster of this device, with nominal costs."""
    return ChainPlanner(
        ModelCosts.of(SHAPE, hardware),
        max_ranks=2,
        max_tokens=8192,
        local=LOCAL,
        table=table,
        devices=frozenset({name}),
    )


BELIEFS = {name: planner_of(hardware, name) for name, hardware in NOMINAL.items()}


def drawn(rng: random.Random, hardware: Hardware) -> Hardware:
    """The true rates of a kind of device."""

    def times(value: float) -> float:
        return value * 2 ** rng.uniform(-1, 1)

    link = LinkModel(times(hardware.link.latency_s), times(hardware.link.bandwidth) / rng.choice((1, 1, 2)))
    return replace(
        hardware,
        linear_flops=times(hardware.linear_flops),
        pair_flops=times(hardware.pair_flops),
        memory_bandwidth=times(hardware.memory_bandwidth),
        fixed_s=hardware.fixed_s + rng.uniform(0, 1e-4),
        issue_s=hardware.issue_s * rng.uniform(1, 2),
        link=link,
    )


def planned_by(planner: ChainPlanner, members: Membership, clock: ManualClock) -> Chooser:
    """A chooser with a planner of its own, which has learnt nothing yet."""
    own = ChainPlanner(
        planner.nominal,
        max_ranks=planner.max_ranks,
        max_tokens=planner.max_tokens,
        local=planner.local,
        table=planner.table,
        devices=planner.devices,
    )
    return Chooser(members, own, clock, CONFIG)


class Case:
    """A cluster at random: as the chooser knows it, and as it is."""

    def __init__(self, rng: random.Random, num_taught: int) -> None:
        self.rng, self.clock = rng, ManualClock(1000.0)
        self.hardware = {name: drawn(rng, hardware) for name, hardware in NOMINAL.items()}
        num_groups = rng.randint(1, 8)
        num_generation = rng.randint(1, num_groups)
        prefill = tuple(self._prefill(number) for number in range(num_groups - num_generation))
        generation = tuple(self._generation(number) for number in range(num_generation))
        home = generation[0].profile
        assert home is not None
        self.belief = planned_by(BELIEFS[home.name], Membership(), self.clock)
        true = planner_of(self.hardware[home.name], home.name, PartitionTable({}))
        self.truth = planned_by(true, Membership(), self.clock)
        self.belief.context.members.update(ClusterView(prefill, generation))
        self.truth.context.members.update(
            ClusterView(tuple(map(self._truly, prefill)), tuple(map(self._truly, generation)))
        )
        self._teach(num_taught)
        self.held = ExitStack()
        for number, group in enumerate(generation):
            self._serve(group, number)
        for number, chain in enumerate(prefill):
            self._queue(chain, 100 * number)

    def _teach(self, num_requests: int) -> None:
        """Let requests of random lengths end, each on a random group, and tell the chooser what they took."""
        for number in range(num_requests):
            group = self.rng.choice(self.belief.context.members.present.groups)
            tokens = TokenRange(0, self._num_tokens())
            belief, truth = self.belief.context.planner_of(group), self._true_planner(group)
            if isinstance(group, PrefillGroup):
                chunks = belief.chunks(tokens, len(group.endpoints))
                belief.observe(group.name, self._timings(truth, chunks, 10**12 * (number + 1)))
            else:
                true_s = truth.alone_s(tokens)
                assert true_s is not None
                belief.observe_local(tokens, true_s)
                step = truth.nominal.step
                costs = LearntCosts(step, step, step.token_s, 20)
                self.belief.context.members.step_costs[group.name] = costs

    def regret(self) -> float:
        """Place a request. Return its true time, divided by that of the best option."""
        record = self._record("asked", self._num_tokens())
        with ExitStack() as held:
            plan = plan_now(self.belief, record, held)
        assert plan is not None
        pairs = AllPairs(self.truth.context, record)
        costs_s = [self._cost_s(plan, pairs)]
        for generation in self.truth.context.members.present.generation:
            local = pairs.local(generation)
            assert local is not None
            costs_s.append(local.terms.cost_s)
            for way in pairs.chains(generation):
                assert way.group is not None and way.chain is not None
                fetch_s = 0.0 if way.fetch is None else way.fetch.predicted_s
                costs_s.append(self._chain_s(generation, way.group, way.chain, fetch_s, record))
        return costs_s[0] / min(costs_s)

    def _cost_s(self, plan: Plan, pairs: AllPairs) -> float:
        """Return the true time of the chosen option: own and delay of others."""
        true = {group.name: group for group in self.truth.context.members.present.groups}
        generation = true[plan.generation.name]
        assert isinstance(generation, GenerationGroup)
        if plan.chain is None:
            ways = [way for way in pairs.locals(generation) if (way.fetch is None) == (plan.fetch is None)]
            return ways[0].terms.cost_s
        group, fetch_s = true[plan.chain.group.name], 0.0
        assert isinstance(group, PrefillGroup)
        if plan.fetch is not None:
            num_fetched = (len(plan.fetch.names) - plan.fetch.num_held) * BLOCK
            fetch_s = self.truth.context.planner.fetch_s(num_fetched, is_far=plan.fetch.is_far)
        return self._chain_s(generation, group, plan.chain.plan, fetch_s, pairs.record)

    def _chain_s(
        self, generation: GenerationGroup, group: PrefillGroup, plan: ChainPlan, fetch_s: float, record: RequestRecord
    ) -> float:
        """Return the true time of a chain, which the chooser or the reference has planned: own and delay of others."""
        context, planner = self.truth.context, self.truth.context.planner_of(group)
        jobs = context.members.prefill_queues.pending(group.incarnation, self.clock.now_s())
        lefts_s, num_ahead = [job.left_s for job in jobs], plan.choice.num_ahead
        own_s = dict(zip(plan.ranks, planner.rank_s(plan.chunks), strict=True))
        begins_s = max(finishes_s(lefts_s[:num_ahead])[1][rank] for rank in plan.ranks)
        ttft_s = planner.ttft_s(plan.chunks)
        after_s = finishes_s([*lefts_s[:num_ahead], own_s, *lefts_s[num_ahead:]])[0][num_ahead + 1 :]
        others_s = sum(after_s) - sum(finishes_s(lefts_s)[0][num_ahead:])
        blocks = PromptBlocks.of(record.request.prompt_ids, BLOCK, "layout", "")
        num_cached = blocks.cached_tokens(context.prefixes.num_held(generation.prefix_store, blocks.names))
        is_elsewhere = all(node_of(each) != node_of(generation.endpoint) for each in group.endpoints)
        moved_s = planner.transfer_s(record.num_tokens - num_cached, ttft_s, is_elsewhere=is_elsewhere)
        num_rows = context.members.load(generation.name).num_slots
        step_s = context.step_s(generation, num_rows, record.num_tokens)
        return max(begins_s, fetch_s) + ttft_s + others_s + moved_s + step_s / 2

    def _truly(self, group: G) -> G:
        assert group.profile is not None
        name = group.profile.name
        return replace(group, profile=replace(group.profile, hardware=self.hardware[name]))

    def _true_planner(self, group: Group) -> ChainPlanner:
        assert group.profile is not None
        name = group.profile.name
        return self.truth.context.planner.for_device(replace(group.profile, hardware=self.hardware[name]))

    def _timings(self, truth: ChainPlanner, chunks: tuple[TokenRange, ...], start_ns: int) -> list[RankTiming]:
        """Return the timings that the ranks report of a chain that ran alone."""
        tail_ns = round(1e9 * truth.transfer_s(chunks[-1].end, truth.ttft_s(chunks)))
        end_ns = start_ns + round(1e9 * max(truth.rank_s(chunks)))
        num_bytes = SHAPE.num_layers * SHAPE.kv_bytes
        timings = []
        for rank, (tokens, seconds) in enumerate(zip(chunks, truth.rank_s(chunks), strict=True)):
            ended_ns = start_ns + round(1e9 * seconds)
            pushed = num_bytes * len(tokens)
            timings.append(RankTiming(rank, tokens, start_ns, ended_ns, 0.0, start_ns, end_ns + tail_ns, pushed, 0, ()))
        return timings

    def _serve(self, group: GenerationGroup, number: int) -> None:
        """Let the group decode some sequences, prefill some prompts by itself, and have some blocks of the prompt."""
        rng = self.rng
        for row in range(rng.choice((0, 0, 4, 16))):
            record = self._record(
                f"row {number}.{row}", rng.randint(200, 4000), first=10**6 * (number + 1) + 10**4 * row
            )
            for chooser in (self.belief, self.truth):
                context = chooser.context
                self.held.enter_context(context.members.hold(group.name, 1))
                context.generation_load.place(record, group.incarnation, context.planner)
        for row in range(rng.choice((0, 0, 0, 1, 2))):
            tokens = TokenRange(0, self._num_tokens())
            record = self._record(f"prompt {number}.{row}", len(tokens), first=10**7 * (number + 1) + 10**4 * row)
            for chooser, planner in (
                (self.belief, self.belief.context.planner_of(group)),
                (self.truth, self._true_planner(group)),
            ):
                load = chooser.context.generation_load
                terms = local_terms(planner, tokens, (0, 0))
                assert terms is not None
                terms = replace(terms, queue_s=load.queue_s(group.incarnation, self.clock.now_s()))
                load.place(record, group.incarnation, planner, terms, now_s=self.clock.now_s())
        self._cache(group.prefix_store)

    def _queue(self, group: PrefillGroup, number: int) -> None:
        """Give the group some jobs, and some blocks of the prompt."""
        now_s = self.clock.now_s()
        believed, true = (chooser.context for chooser in (self.belief, self.truth))
        for job in range(number, number + self.rng.choice((0, 0, 1, 3))):
            tokens, queues = TokenRange(0, self._num_tokens()), believed.members.prefill_queues
            plan = PromptChains(believed.planner_of(group), believed.config, tokens).plan(
                len(group.endpoints), queues.pending(group.incarnation, now_s), now_s
            )
            queues.add(group.incarnation, JobId(job), plan.job, now_s)
            left_s = dict(zip(plan.ranks, self._true_planner(group).rank_s(plan.chunks), strict=True))
            true.members.prefill_queues.add(group.incarnation, JobId(job), replace(plan.job, left_s=left_s), now_s)
        self._cache(group.prefix_store)

    def _cache(self, store: str) -> None:
        names = PromptBlocks.of(tuple(range(8192)), BLOCK, "layout", "").names
        if store and self.rng.random() < 0.5:
            held = names[: self.rng.randint(1, len(names))]
            for chooser in (self.belief, self.truth):
                chooser.context.prefixes.use(store, held)

    def _num_tokens(self) -> int:
        return round(2 ** self.rng.uniform(6, 13))

    def _record(self, name: str, num_tokens: int, first: int = 0) -> RequestRecord:
        request = Request(RequestId(name), tuple(range(first, first + num_tokens)), SamplingParams(max_tokens=100))
        record = RequestRecord.of(request, received_ns=0)
        record.admit(StoppedClock(1))
        if first:
            record.place(self.clock)
        return record

    def _profile(self) -> DeviceProfile:
        name = self.rng.choice(list(NOMINAL))
        return DeviceProfile(name, "cpu" if name == "CPU" else "cuda", NOMINAL[name], NOMINAL[name].memory_bandwidth)

    def _prefill(self, number: int) -> PrefillGroup:
        node, store = f"n{number}", self.rng.choice(("", f"s{number}"))
        endpoints = tuple(f"{node}:{rank}" for rank in range(self.rng.randint(1, 2)))
        return PrefillGroup(f"p{number}", endpoints, Epoch(1), prefix_store=store, profile=self._profile())

    def _generation(self, number: int) -> GenerationGroup:
        node, store = f"n{self.rng.randint(0, 8)}", self.rng.choice(("", f"g{number}"))
        return GenerationGroup(
            f"g{number}", f"{node}:9", "layout", 32, 2**17, prefix_store=store, profile=self._profile()
        )


def regrets(num_taught: int) -> np.ndarray:
    found = []
    for number in range(NUM_CASES):
        case = Case(random.Random(SEED + number), num_taught)
        with case.held:
            found.append(case.regret())
    return np.array(found)


def test_regret_is_small_after_twenty_requests() -> None:
    found = regrets(NUM_TAUGHT)
    assert np.median(found) <= 1.02
    assert np.percentile(found, 95) <= 1.10
    assert found.max() <= 1.5


def test_regret_is_bounded_before_anything_was_learnt() -> None:
    assert np.percentile(regrets(0), 95) <= 1.5
