"""The group that costs least, or the least loaded, of those that can take the request; None when none can."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from baton.results.prefill_trace import PlacementTerms
from baton.sampling_params import SamplingParams
from baton.types import Epoch, RequestId
from orchestrator.membership.loads import Load
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.comparison import (
    LoadOf,
    able_groups,
    cheapest_group,
    compare,
    groups_with_room,
)
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request

A = GenerationGroup("a", "h:1", "layout", num_slots=2, max_slot_tokens=100)
B = replace(A, name="b", endpoint="h:2", num_slots=4)
P = PrefillGroup("p", ("h:3",), Epoch(1))
Q = PrefillGroup("q", ("h:4",), Epoch(1))
WIDE = PrefillGroup("w", ("h:5", "h:6"), Epoch(1))
REQUEST = RequestRecord.of(Request(RequestId("r"), tuple(range(90)), SamplingParams(max_tokens=10)), received_ns=0)


def terms(
    queue_s: float = 0.0, prefill_s: float = 0.0, steps_s: float = 0.0, transfer_s: float = 0.0, others_s: float = 0.0
) -> PlacementTerms:
    return PlacementTerms(queue_s, prefill_s, steps_s, transfer_s, others_s)


def loads(given: Mapping[str, Load]) -> LoadOf:
    return lambda name: given.get(name, Load())


def generation(*groups: GenerationGroup, avoid: frozenset[object] = frozenset(), **held: int) -> GenerationGroup | None:
    load_of = loads({name: Load(num_slots=number) for name, number in held.items()})
    return choose(groups, load_of, avoid=avoid)


def choose(
    groups: tuple[GenerationGroup, ...],
    load_of: LoadOf,
    record: RequestRecord = REQUEST,
    avoid: frozenset[object] = frozenset(),
    cost_of: Callable[[GenerationGroup], float] = lambda group: 0.0,
) -> GenerationGroup | None:
    able = able_groups(ClusterView(generation=groups), record, avoid)
    return cheapest_group(groups_with_room(able, load_of, record.request.num_slots), load_of, cost_of)


def test_the_most_free_slots_win() -> None:
    assert generation(A, B) == B
    assert generation(A, B, b=3) == A
    assert generation(A, B, b=2) == A  # of equals the first


def test_choices_need_as_many_slots() -> None:
    three = RequestRecord.of(Request(RequestId("r"), (1,), SamplingParams(max_tokens=10, n=3)), received_ns=0)
    assert choose((A, B), loads({}), three) == B
    assert choose((A, B), loads({"b": Load(num_slots=2)}), three) is None


def test_a_group_that_is_full_too_small_or_not_ready_takes_nobody() -> None:
    assert generation(A) == A
    assert generation(A, a=2) is None
    assert generation(replace(A, max_slot_tokens=99)) is None
    assert generation(replace(A, ready=False)) is None


def test_a_life_to_avoid_is_avoided_and_its_next_is_not() -> None:
    assert generation(A, avoid=frozenset({A.incarnation})) is None
    assert generation(replace(A, endpoint="h:9"), avoid=frozenset({A.incarnation})) is not None


def test_the_cheaper_group_wins_and_of_groups_alike_the_one_with_room() -> None:
    for costs, cheapest in (
        ({"a": 0.3, "b": 0.2}, B),
        ({"a": 0.2, "b": 0.3}, A),
        ({"a": 0.2000, "b": 0.2001}, B),
    ):
        assert choose((A, B), loads({}), cost_of=lambda group, costs=costs: costs[group.name]) == cheapest  # type: ignore[misc]


def test_a_group_is_not_asked_for_its_cost_where_there_is_no_choice() -> None:
    def asked(group: GenerationGroup) -> float:
        raise AssertionError(group.name)

    assert choose((A,), loads({}), cost_of=asked) == A


def test_who_is_faster_prefills_and_of_equals_the_chain() -> None:
    chain = terms(queue_s=0.2, prefill_s=0.1, transfer_s=0.05, others_s=0.05)
    assert compare(chain, terms(prefill_s=0.39)).reason == "local_faster"
    assert compare(chain, terms(prefill_s=0.30, steps_s=0.1)).reason == "chain_faster"
    assert compare(chain, terms(queue_s=0.1, prefill_s=0.30, steps_s=0.1)).reason == "chain_faster"
    assert compare(chain, None).reason == "not_predicted"


def test_a_placement_is_explained_in_one_line() -> None:
    placement = compare(terms(queue_s=0.2, prefill_s=0.1), terms(prefill_s=0.25))
    assert placement.is_local
    assert placement.text == (
        "local_faster; predicted seconds: chain 0.300 (queue 0.200, prefill 0.100), local 0.250 (prefill 0.250)"
    )
    assert not compare(terms(), None).is_local
