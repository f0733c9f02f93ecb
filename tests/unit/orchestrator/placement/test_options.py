"""The group that costs least, or the least loaded, of those that can take the request; none when none can."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from baton.planning.device_profile import nominal_core
from baton.planning.planner import ChainPlanner
from baton.planning.step_cost import LearntCosts
from baton.planning.work_cost import WorkCost
from baton.results.prefill_trace import PlacementTerms
from baton.sampling_params import SamplingParams
from baton.types import Epoch, JobId, Rank, RequestId, TokenRange
from orchestrator.membership.members import Membership
from orchestrator.membership.prefill_queues import Pending
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.chain_width import PromptChains
from orchestrator.placement.chooser import Chooser
from orchestrator.placement.context import AttemptPrompt
from orchestrator.placement.options import ClusterSnapshot, GroupChain, Option, decide
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from tests.support.clusters.planners import deciding_planner
from tests.support.manual_clock import ManualClock

A = GenerationGroup("a", "h:1", "layout", num_slots=2, max_slot_tokens=100)
B = replace(A, name="b", endpoint="h:2", num_slots=4)
P = PrefillGroup("p", ("h:3",), Epoch(1))
PLANNER = deciding_planner()
CHAIN = GroupChain(P, PromptChains(PLANNER, OrchestratorConfig(overtaking=0.1), TokenRange(0, 9)).plan(1, (), 0.0))


def request(num_choices: int = 1) -> RequestRecord:
    params = SamplingParams(max_tokens=10, n=num_choices)
    return RequestRecord.of(Request(RequestId("r"), tuple(range(90)), params), received_ns=0)


def terms(
    queue_s: float = 0.0, prefill_s: float = 0.0, steps_s: float = 0.0, transfer_s: float = 0.0, others_s: float = 0.0
) -> PlacementTerms:
    return PlacementTerms(queue_s, prefill_s, steps_s, transfer_s, others_s)


def members_of(*groups: GenerationGroup) -> Membership:
    members = Membership()
    members.update(ClusterView(generation=groups))
    return members


def snapshot_of(members: Membership) -> ClusterSnapshot:
    chooser = Chooser(members, PLANNER, ManualClock(), OrchestratorConfig())
    return ClusterSnapshot(AttemptPrompt(chooser.context, request()))


def with_room(
    members: Membership, record: RequestRecord | None = None, avoid: frozenset[object] = frozenset(), **held: int
) -> list[GenerationGroup]:
    chooser = Chooser(members, PLANNER, ManualClock(), OrchestratorConfig())
    with ExitStack() as stack:
        for name, num_slots in held.items():
            stack.enter_context(members.hold(name, num_slots))
        return chooser.with_room(record or request(), avoid)


def best(members: Membership, **cost_s: float) -> GenerationGroup:
    options = [Option(group, terms(prefill_s=cost_s[group.name])) for group in members.view.generation]
    return min(options, key=snapshot_of(members).order).generation


def test_choices_need_as_many_slots() -> None:
    assert with_room(members_of(A, B), request(3)) == [B]
    assert with_room(members_of(A, B), request(3), b=2) == []


def test_a_group_that_is_full_too_small_or_not_ready_takes_nobody() -> None:
    assert with_room(members_of(A)) == [A]
    assert with_room(members_of(A), a=2) == []
    assert with_room(members_of(replace(A, max_slot_tokens=99))) == []
    assert with_room(members_of(replace(A, ready=False))) == []


def test_a_life_to_avoid_is_avoided_and_its_next_is_not() -> None:
    avoid = frozenset({A.incarnation})
    assert with_room(members_of(A), avoid=avoid) == []
    assert with_room(members_of(replace(A, endpoint="h:9")), avoid=avoid) != []


def test_the_cheaper_group_wins_and_of_groups_alike_the_one_with_room() -> None:
    members = members_of(A, B)
    assert best(members, a=0.3, b=0.2) == B
    assert best(members, a=0.2, b=0.3) == A
    assert best(members, a=0.2000, b=0.2001) == B
    with members.hold("b", 3):
        assert best(members, a=0.2, b=0.2) == A
    with members.hold("b", 2):
        assert best(members, a=0.2, b=0.2) == A  # of equals the first


def test_a_group_that_lacks_memory_comes_last() -> None:
    members = members_of(A, B)
    options = [Option(A, terms(prefill_s=9.0)), Option(B, terms(prefill_s=0.1), lacks_memory=True)]
    assert min(options, key=snapshot_of(members).order).generation == A


def test_who_is_faster_prefills_and_of_equals_the_chain() -> None:
    chain = Option(A, terms(queue_s=0.2, prefill_s=0.1, transfer_s=0.05, others_s=0.05), CHAIN)
    for local, reason in (
        (terms(prefill_s=0.39), "local_faster"),
        (terms(prefill_s=0.30, steps_s=0.1), "chain_faster"),
        (terms(queue_s=0.1, prefill_s=0.30, steps_s=0.1), "chain_faster"),
    ):
        option, placement = decide([chain, Option(A, local)], "", "auto")
        assert placement.reason == reason
        assert placement.is_local == (option.chain is None)
        assert (placement.chain, placement.local) == (chain.terms, local)
        always, placement = decide([chain, Option(A, local)], "", "always")
        assert (always, placement.reason) == (chain, "always")
    assert decide([chain], "", "auto")[1].reason == "not_predicted"
    alone, placement = decide([Option(A, None)], "", "auto")
    assert (alone.chain, placement.reason, placement.is_local) == (None, "none_ready", True)
    assert decide([Option(A, None)], "never", "never")[1].reason == "never"


def test_a_placement_is_explained_in_one_line() -> None:
    options = [Option(A, terms(queue_s=0.2, prefill_s=0.1), CHAIN), Option(A, terms(prefill_s=0.25))]
    _, placement = decide(options, "", "auto")
    assert placement.is_local
    assert placement.text == (
        "local_faster; predicted seconds: chain 0.300 (queue 0.200, prefill 0.100), local 0.250 (prefill 0.250)"
    )


def test_of_many_groups_those_with_the_prompt_s_blocks_and_the_least_load_are_priced() -> None:
    members, clock = Membership(), ManualClock(1000.0)
    prefill = tuple(
        PrefillGroup(f"p{number}", (f"n{number}:1",), Epoch(1), prefix_store=f"s{number}") for number in range(40)
    )
    members.update(ClusterView(prefill, (A,)))
    chooser = Chooser(members, PLANNER, clock, OrchestratorConfig(block_tokens=32))
    for number, group in enumerate(prefill[:39]):
        members.prefill_queues.add(group.incarnation, JobId(1), Pending(0.0, 1e9, {Rank(0): 1.0 + number}), 1000.0)
    record = request()
    prompt = AttemptPrompt(chooser.context, record)
    chooser.context.prefixes.use("s38", prompt.blocks("layout").names[:1])
    snapshot = ClusterSnapshot(prompt)
    priced = [group.name for group in snapshot._sample(prefill, "layout")]
    assert priced == ["p38", "p39", *(f"p{number}" for number in range(14))]
    best = snapshot.by_chains(A)[0].chain
    assert best is not None and best.group.name == "p39"


def test_steps_are_predicted_by_the_costs_that_the_engine_has_learnt() -> None:
    members = members_of(A)
    context = Chooser(members, PLANNER, ManualClock(), OrchestratorConfig()).context
    assert context.step_s(A, 4, 100) == PLANNER.step_s(4, 100)
    cost = WorkCost(step_s=1.0, token_s=0.5, key_s=0.01, pair_s=0.0)
    for num_steps, step_s in ((31, PLANNER.step_s(4, 100)), (32, 1.0 + 4 * 0.5 + 400 * 0.01)):
        members.step_costs["a"] = LearntCosts(cost, cost, 0.0, num_steps)
        assert context.step_s(A, 4, 100) == pytest.approx(step_s)
    assert context.step_s(A, 0, 100) == 0.0


def test_a_group_s_planner_is_that_of_its_device() -> None:
    planner = ChainPlanner(PLANNER.nominal, max_ranks=1, max_tokens=64, devices=frozenset({"here"}))
    here, there = (replace(nominal_core(2), name=name) for name in ("here", "there"))
    a, b, p = replace(A, profile=here), replace(B, profile=there), replace(P, profile=there)
    context = Chooser(members_of(a, b), planner, ManualClock(), OrchestratorConfig()).context
    assert context.planner_of(A) is context.planner_of(a) is planner  # without a profile, that of the cluster
    other = context.planner_of(b)
    assert other is context.planner_of(p) is planner.for_device(there) is not planner
    context.members.update(ClusterView((p,), (b,)))
    assert context.planner_of(b) is other  # also where it is the only device
    assert context.step_s(b, 4, 100) == other.step_s(4, 100) != planner.step_s(4, 100)
