"""The group that costs least, or the least loaded, of those that can take the request; None when none can."""

from collections.abc import Mapping
from dataclasses import replace

from baton.ids import Epoch, Rank, RequestId
from baton.sampling_params import SamplingParams
from baton.types import TokenRange
from orchestrator.backlog import Pending
from orchestrator.lifecycle import RequestRecord
from orchestrator.membership import ClusterView, GenerationGroup, Load, PrefillGroup
from orchestrator.placement import LoadOf, choose_generation, choose_prefill
from orchestrator.widths import ChainPlan, WidthPolicy
from tests.support.planners import linear_planner

A = GenerationGroup("a", "h:1", "layout", num_slots=2, max_slot_tokens=100)
B = replace(A, name="b", endpoint="h:2", num_slots=4)
P = PrefillGroup("p", ("h:3",), Epoch(1))
Q = PrefillGroup("q", ("h:4",), Epoch(1))
WIDE = PrefillGroup("w", ("h:5", "h:6"), Epoch(1))
REQUEST = RequestRecord.of(RequestId("r"), tuple(range(90)), SamplingParams(max_tokens=10), received_ns=0)


def loads(given: Mapping[str, Load]) -> LoadOf:
    return lambda name: given.get(name, Load())


def generation(*groups: GenerationGroup, avoid: frozenset[object] = frozenset(), **held: int) -> GenerationGroup | None:
    load_of = loads({name: Load(num_slots=number) for name, number in held.items()})
    return choose_generation(ClusterView(generation=groups), load_of, REQUEST, avoid)


def prefill(*groups: PrefillGroup, avoid: frozenset[object] = frozenset(), **busy_s: float) -> PrefillGroup | None:
    policy, now_s = WidthPolicy(linear_planner(), elastic=True, overtaking=0.15), 1000.0

    def plan_for(group: PrefillGroup) -> ChainPlan:
        left_s = {Rank(rank): busy_s.get(group.name, 0.0) for rank in range(len(group.endpoints))}
        pending = [Pending(now_s, now_s, left_s)] if group.name in busy_s else []
        return policy.chains(TokenRange(0, REQUEST.num_tokens)).plan(len(group.endpoints), pending, now_s)

    found = choose_prefill(ClusterView(prefill=groups), plan_for, avoid)
    return None if found is None else found[0]


def test_the_most_free_slots_win() -> None:
    assert generation(A, B) == B
    assert generation(A, B, b=3) == A


def test_choices_need_as_many_slots() -> None:
    three = RequestRecord.of(RequestId("r"), (1,), SamplingParams(max_tokens=10, n=3), received_ns=0)
    view = ClusterView(generation=(A, B))
    assert choose_generation(view, loads({}), three, ()) == B
    assert choose_generation(view, loads({"b": Load(num_slots=2)}), three, ()) is None


def test_of_equals_the_first() -> None:
    assert generation(A, B, b=2) == A


def test_a_full_group_takes_nobody() -> None:
    assert generation(A, a=2) is None


def test_a_group_whose_slots_are_too_small_takes_nobody() -> None:
    assert generation(replace(A, max_slot_tokens=99)) is None
    assert generation(A) == A


def test_a_group_that_is_not_ready_takes_nobody() -> None:
    assert generation(replace(A, ready=False)) is None
    assert prefill(replace(P, ready=False)) is None


def test_a_life_to_avoid_is_avoided_and_its_next_is_not() -> None:
    assert generation(A, avoid=frozenset({A.life})) is None
    assert generation(replace(A, endpoint="h:9"), avoid=frozenset({A.life})) is not None
    assert prefill(P, avoid=frozenset({P.life})) is None
    assert prefill(replace(P, epoch=Epoch(2)), avoid=frozenset({P.life})) is not None


def test_the_prompt_goes_where_it_is_done_first() -> None:
    assert prefill(P, Q, p=1.0) == Q
    assert prefill(P, Q, p=1.0, q=2.0) == P
    assert prefill(P, Q, WIDE) == WIDE
    assert prefill(P, Q, WIDE, p=1.0, w=1.0) == Q
    assert prefill() is None


def test_of_equal_chains_the_first() -> None:
    assert prefill(Q, P) == Q
