"""Views replace each other, loads balance, waiting is bounded, and job numbers never come again."""

import asyncio
from dataclasses import replace

import pytest

from baton.errors import NotFoundError, UnavailableError
from baton.process.backoff import Backoff
from baton.process.clock import SystemClock
from baton.types import Epoch
from orchestrator.membership.breakers import Breakers
from orchestrator.membership.loads import Load
from orchestrator.membership.members import Membership
from orchestrator.membership.view import AbsentGroup, ClusterView, GenerationGroup, Orders, PrefillGroup
from tests.support.manual_clock import ManualClock

GROUP = GenerationGroup("g", "h:1", "layout", num_slots=4, max_slot_tokens=100)
OTHER = GenerationGroup("o", "h:4", "layout", num_slots=4, max_slot_tokens=100)
CHAIN = PrefillGroup("p", ("h:2", "h:3"), Epoch(1))


def first_group(members: Membership) -> GenerationGroup | None:
    return next((group for group in members.view.generation if group.ready), None)


async def test_waiting_ends_with_the_view_that_brings_a_group() -> None:
    members = Membership()
    waiting = asyncio.create_task(members.until(lambda: first_group(members), 20))
    await asyncio.sleep(0)
    members.update(ClusterView())
    await asyncio.sleep(0)
    assert not waiting.done()
    members.update(ClusterView(generation=(GROUP,)))
    assert await waiting == GROUP


async def test_waiting_ends_when_a_group_is_let_go() -> None:
    members = Membership()
    with members.hold("g"):
        waiting = asyncio.create_task(members.until(lambda: None if members.load("g").num_requests else GROUP, 20))
        await asyncio.sleep(0)
    assert await waiting == GROUP


async def test_waiting_is_bounded() -> None:
    members = Membership()
    assert await members.until(lambda: first_group(members), 0.01) is None


async def test_a_cancelled_wait_is_cancelled() -> None:
    waiting = asyncio.create_task(Membership().until(lambda: None, 20))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_loads_add_up_and_go() -> None:
    members = Membership()
    with members.hold("g", 3), members.hold("g", 1):
        assert members.load("g") == Load(num_requests=2, num_slots=4)
    assert members.load("g") == Load()


async def test_a_group_s_load_outlives_its_view() -> None:
    members = Membership()
    with members.hold("g"):
        members.update(ClusterView())
        assert members.load("g").num_requests == 1


async def test_an_update_is_told() -> None:
    members = Membership()
    changed = members.view_changed
    members.update(ClusterView(generation=(GROUP,)))
    assert changed.is_set() and not members.view_changed.is_set()


def test_a_view_knows_its_slots_and_workers() -> None:
    view = ClusterView((CHAIN,), (GROUP, GROUP))
    assert view.num_slots == 8
    assert view.endpoints == {"h:1", "h:2", "h:3"}


async def test_a_drained_group_gets_no_work_in_any_life_until_that_is_undone() -> None:
    members = members_of(GROUP, OTHER)
    told = [members.view_changed]
    members.drain("g")
    assert members.view.num_slots == 4
    told.append(members.view_changed)
    assert (members.view.generation, members.present.generation) == ((OTHER,), (GROUP, OTHER))
    members.update(ClusterView(generation=(replace(GROUP, endpoint="h:9"), OTHER)))
    assert members.view.generation == (OTHER,)
    assert members.orders.drained == {"g"} and members.is_drained(GROUP)
    assert members.view.num_slots == 4
    told.append(members.view_changed)
    members.undrain("g")
    assert [group.name for group in members.view.generation] == ["g", "o"]
    assert members.view.num_slots == 8
    assert len({*map(id, told)}) == 3 and all(each.is_set() for each in told)


def test_only_a_group_that_is_there_can_be_drained() -> None:
    members = members_of(GROUP, OTHER, CHAIN)
    for act in (members.drain, members.undrain):
        with pytest.raises(NotFoundError, match="there is no group x: name one of g, o, p"):
            act("x")
    with pytest.raises(NotFoundError, match="no group exists"):
        Membership().drain("g")


def test_a_drained_group_leaves_where_somebody_ends_workers_and_comes_back_with_its_work() -> None:
    members = members_of(GROUP, OTHER)
    members.drain("g")
    with pytest.raises(UnavailableError, match="g cannot leave, as no supervisor ends its workers: drain it with --"):
        members.dismiss("g")
    members.hear_kept(members.orders)
    members.dismiss("g")
    assert members.orders == Orders(drained=frozenset({"g"}), leaving=frozenset({"g"}))
    away = AbsentGroup("g", "generate")
    members.update(ClusterView(generation=(OTHER,), absent=(away,)))
    assert (members.is_present("g"), members.absence("g"), members.absence("o")) == (False, away, None)
    members.undrain("g")
    assert members.orders == Orders()


def test_a_stand_in_has_a_free_number_and_is_forgotten_when_it_has_left() -> None:
    members = members_of(replace(GROUP, name="g-0"), replace(GROUP, name="g-2"))
    with pytest.raises(UnavailableError, match="nothing can stand in for g-0, as no supervisor starts workers here"):
        members.stand_in("g-0")
    members.hear_kept(Orders())
    members.use_model("g-0", "/new")
    assert members.stand_in("g-0") == "g-1"
    assert members.stand_in("g-0") == "g-3"
    assert members.orders.stand_ins == {"g-1", "g-3"}
    assert members.orders.models == dict.fromkeys(("g-0", "g-1", "g-3"), "/new")
    view = replace(members.present, generation=(*members.present.generation, replace(GROUP, name="g-1")))
    members.update(view)
    members.drain("g-1")
    members.dismiss("g-1")
    assert members.orders.leaving == {"g-1"}  # as long as it is there
    members.update(replace(members.present, generation=view.generation[:2], absent=(AbsentGroup("g-1", "generate"),)))
    assert members.orders == Orders(stand_ins=frozenset({"g-3"}), models=dict.fromkeys(("g-0", "g-3"), "/new"))


def test_a_stand_in_that_is_given_up_before_it_is_there_stays_in_the_orders_until_it_is_away() -> None:
    members = members_of(replace(GROUP, name="g-0"))
    members.hear_kept(Orders())
    made = members.stand_in("g-0")
    members.give_up(made)
    only = frozenset({made})
    assert members.orders == Orders(drained=only, leaving=only, stand_ins=only)
    members.update(replace(members.present, absent=(AbsentGroup(made, "generate"),)))
    members.give_up(made)
    assert members.orders == Orders()


def test_a_group_loads_another_model_when_it_comes_back_and_not_while_it_is_there() -> None:
    members = members_of(GROUP)
    with pytest.raises(UnavailableError, match="g has workers, which keep their model: drain it first, without --keep"):
        members.undrain("g", "/new")
    members.update(ClusterView(absent=(AbsentGroup("g", "generate"),)))
    members.undrain("g", "/new")
    assert members.orders == Orders(models={"g": "/new"})
    members.use_model("g", None)
    assert members.orders == Orders()


def test_a_chain_is_for_groups_that_take_its_kv() -> None:
    chains = (CHAIN, replace(CHAIN, name="q", layout_fingerprint="layout"), replace(CHAIN, layout_fingerprint="new"))
    view = ClusterView(chains, (GROUP,))
    assert view.chains_for(GROUP) == ClusterView(chains[:2], (GROUP,))
    assert view.chains_for(replace(GROUP, layout_fingerprint="new")).prefill == (chains[0], chains[2])


async def test_whoever_waits_hears_of_a_drain_and_of_its_end() -> None:
    members = members_of(GROUP)
    members.drain("g")
    waiting = asyncio.create_task(members.until(lambda: first_group(members), 20))
    await asyncio.sleep(0)
    members.undrain("g")
    assert await waiting == GROUP


async def test_a_group_that_fails_again_and_again_is_not_ready_and_then_gets_one_attempt() -> None:
    clock = ManualClock()
    members = members_of(GROUP, OTHER, breakers=Breakers(clock, 2, Backoff(1.0, 10.0)))
    members.failed(GROUP.incarnation)
    assert members.may_have_work(GROUP)
    members.failed(GROUP.incarnation)
    assert [(group.name, group.ready) for group in members.view.generation] == [("g", False), ("o", True)]
    assert (members.may_have_work(GROUP), members.is_broken(GROUP), members.is_broken(OTHER)) == (False, True, False)
    clock.advance(1.0)
    assert members.may_have_work(GROUP)
    with members.hold("g"):
        assert not members.may_have_work(GROUP)
    assert (members.may_have_work(GROUP), members.is_broken(GROUP)) == (True, False)


async def test_an_attempt_that_raises_proves_nothing() -> None:
    clock = ManualClock()
    members = members_of(GROUP, breakers=Breakers(clock, 1, Backoff(1.0, 10.0)))
    members.failed(GROUP.incarnation)
    clock.advance(1.0)
    with pytest.raises(UnavailableError), members.hold("g"):
        raise UnavailableError("its group's other half")
    assert members.is_broken(GROUP)


async def test_whoever_waits_hears_of_a_pause_s_end() -> None:
    members = members_of(GROUP, breakers=Breakers(SystemClock(), 1, Backoff(0.05, 10.0)))
    members.failed(GROUP.incarnation)
    assert await members.until(lambda: first_group(members), 20) == GROUP


def test_a_repaired_group_is_not_broken_any_more() -> None:
    members = members_of(GROUP, breakers=Breakers(ManualClock(), 1))
    members.breakers.failed(GROUP.incarnation)
    members.update(ClusterView(generation=(replace(GROUP, endpoint="h:9"),)))
    assert len(members.breakers) == 0


def members_of(*groups: PrefillGroup | GenerationGroup, breakers: Breakers | None = None) -> Membership:
    """All ready."""
    members = Membership(breakers)
    prefill = tuple(group for group in groups if isinstance(group, PrefillGroup))
    members.update(ClusterView(prefill, tuple(group for group in groups if isinstance(group, GenerationGroup))))
    return members
