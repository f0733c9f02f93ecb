"""Workers are lent to groups of the other role: the orders, who gets work meanwhile, and what is refused."""

from dataclasses import replace

import pytest

from baton.errors import NotFoundError, UnavailableError
from baton.types import Epoch
from orchestrator.membership.members import Membership
from orchestrator.membership.view import AbsentGroup, ClusterView, GenerationGroup, Orders, PrefillGroup, place_of

ENGINE = GenerationGroup("generate-0", "h:1", "layout", num_slots=4, max_slot_tokens=100)
OTHER = replace(ENGINE, name="generate-1", endpoint="h:4")
CHAIN = PrefillGroup("prefill-0", ("h:2", "h:3"), Epoch(1))
REST = replace(CHAIN, endpoints=("h:2",), epoch=Epoch(2))
BORROWER = replace(ENGINE, name="generate-2", endpoint="h:5")
LENT = Orders(stand_ins=frozenset({"generate-2"}), lent={"generate-2": "prefill-0.1"})


def members_of(view: ClusterView, orders: Orders | None = None) -> Membership:
    """Members that a supervisor keeps."""
    members = Membership()
    members.update(view)
    members.keep_orders(orders or Orders())
    members.hear_kept(members.orders)
    return members


def names(members: Membership) -> list[str]:
    return [group.name for group in members.view.groups]


WHOLE = ClusterView((CHAIN,), (ENGINE, OTHER))
SPLIT = ClusterView((REST,), (ENGINE, OTHER, BORROWER))


@pytest.mark.parametrize(
    ("worker", "place"), [("prefill-0.1", ("prefill-0", 1)), ("prefill-12.10", ("prefill-12", 10)), ("g-3", ("g-3", 0))]
)
def test_a_worker_s_name_says_its_group_and_rank(worker: str, place: tuple[str, int]) -> None:
    assert place_of(worker) == place


def test_a_chain_lends_its_last_rank_and_gets_work_again_when_that_serves_elsewhere() -> None:
    members = members_of(WHOLE)
    members.drain("prefill-0")
    assert members.lend("prefill-0") == "generate-2"
    assert members.orders == LENT
    assert names(members) == ["generate-0", "generate-1"]
    members.update(replace(WHOLE, prefill=(REST,), absent=(AbsentGroup("generate-2", "generate", starts=True),)))
    assert names(members) == ["generate-0", "generate-1"]
    members.update(SPLIT)
    assert members.view == SPLIT
    assert members.orders.lender("generate-2") == "prefill-0" and not members.orders.lender("generate-1")


def test_a_chain_lends_one_rank_after_the_other_to_the_last() -> None:
    members = members_of(SPLIT, LENT)
    members.drain("prefill-0")
    assert members.lend("prefill-0") == "generate-3"
    assert members.orders.lent == {"generate-2": "prefill-0.1", "generate-3": "prefill-0.0"}
    assert members.orders.borrowers("prefill-0") == {1: "generate-2", 0: "generate-3"}
    engines = (ENGINE, OTHER, BORROWER, replace(BORROWER, name="generate-3"))
    members.update(ClusterView((), engines, (AbsentGroup("prefill-0", "prefill"),)))
    assert members.has_lent_all("prefill-0") and members.away == ()
    with pytest.raises(UnavailableError, match="prefill-0 has lent its workers: .* `baton flip prefill-0 --undo`"):
        members.undrain("prefill-0")
    with pytest.raises(UnavailableError, match="prefill-0 has no workers"):
        members.require_flippable("prefill-0")


def test_an_engine_lends_itself_whole_with_its_model() -> None:
    members = members_of(WHOLE, Orders(models={"generate-1": "/other"}))
    members.drain("generate-1")
    assert members.lend("generate-1") == "prefill-1"
    assert members.orders == Orders(
        stand_ins=frozenset({"prefill-1"}),
        models={"generate-1": "/other", "prefill-1": "/other"},
        lent={"prefill-1": "generate-1"},
    )


def test_a_worker_goes_back_and_all_orders_are_forgotten() -> None:
    members = members_of(SPLIT, LENT)
    members.drain("generate-2")
    members.drain("prefill-0")
    members.give_back("generate-2")
    assert (members.orders.drained, members.orders.leaving) == (frozenset({"generate-2"}),) * 2
    assert names(members) == ["generate-0", "generate-1"]  # the chain is about to be linked anew
    members.update(replace(WHOLE, absent=(AbsentGroup("generate-2", "generate"),)))
    assert members.orders == Orders()
    assert names(members) == ["prefill-0", "generate-0", "generate-1"]


def test_a_chain_does_not_wait_for_a_worker_that_fails_in_its_new_role() -> None:
    members = members_of(replace(SPLIT, generation=(ENGINE, OTHER)), LENT)
    assert names(members) == ["generate-0", "generate-1"]
    failed = AbsentGroup("generate-2", "generate", starts=True, error="no memory")
    members.update(replace(SPLIT, generation=(ENGINE, OTHER), absent=(failed,)))
    assert names(members) == ["prefill-0", "generate-0", "generate-1"]


BOTH = frozenset({"generate-0", "generate-1"})
ONE = ClusterView((CHAIN,), (ENGINE,), (AbsentGroup("generate-1", "generate"),))
LENT_WHOLE = Orders(stand_ins=frozenset({"prefill-1"}), lent={"prefill-1": "generate-1"})


@pytest.mark.parametrize(
    ("view", "orders", "withdrawn"),
    [
        (WHOLE, Orders(BOTH), sorted(BOTH)),
        (WHOLE, Orders(frozenset({"generate-0"})), []),
        (ONE, Orders(BOTH, leaving=frozenset({"generate-1"})), sorted(BOTH)),
        (replace(ONE, absent=(AbsentGroup("generate-1", "generate", starts=True),)), Orders(BOTH - {"generate-1"}), []),
        (WHOLE, Orders(BOTH, surplus=frozenset({"generate-1"})), []),
        (WHOLE, Orders(BOTH, stand_ins=frozenset({"generate-2"})), []),
        (ONE, replace(LENT_WHOLE, drained=frozenset({"generate-0"})), ["generate-0"]),
        (ONE, replace(LENT_WHOLE, drained=frozenset({"generate-0", "prefill-1"})), []),
    ],
    ids=["all", "not all", "one has left", "one starts", "autoscaler", "stand-in", "lent", "lent, and comes back"],
)
def test_all_groups_are_withdrawn_if_operators_alone_can_bring_one_back(
    view: ClusterView, orders: Orders, withdrawn: list[str]
) -> None:
    assert [*members_of(view, orders).withdrawn(lambda group: True)] == withdrawn


def test_groups_that_return_or_could_not_serve_do_not_count_as_withdrawn() -> None:
    members = members_of(WHOLE, Orders(BOTH))
    with members.returning("generate-0"):
        with members.returning("generate-0"):
            assert members.withdrawn(lambda group: True) == ()
        assert members.withdrawn(lambda group: True) == ()
        assert members.withdrawn(lambda group: group.name == "generate-1") == ("generate-1",)
    assert members.withdrawn(lambda group: False) == ()
    assert members.withdrawn(lambda group: True) == ("generate-0", "generate-1")


def test_what_cannot_be_flipped_is_refused_with_the_remedy() -> None:
    members = members_of(replace(WHOLE, generation=(ENGINE, replace(OTHER, ready=False))))
    with pytest.raises(NotFoundError, match="there is no group generate-7: name one of generate-0, generate-1"):
        members.require_flippable("generate-7")
    with pytest.raises(UnavailableError, match="the only group that may generate: .* `baton scale generate 2`"):
        members.require_flippable("generate-0")
    members.require_flippable("generate-1")
    members.require_flippable("prefill-0")
    alone = Membership()
    alone.update(WHOLE)
    with pytest.raises(UnavailableError, match="no supervisor"):
        alone.require_flippable("prefill-0")
