"""Groups lend workers to groups of the other role and get them back: the process stays, requests and books are whole,
and whatever fails on the way leaves a cluster that serves."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from baton.calls.cluster_state import GroupState
from baton.errors import ModelError, NotFoundError, UnavailableError
from deploy.groups.spawner import WorkerHandle
from orchestrator.membership.view import Orders
from tests.support.clusters.supervision import ANSWER, NUM_RANKS, SupervisedCluster, supervised
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration


async def flip(made: SupervisedCluster, name: str) -> str:
    """To its end; the group that serves then."""
    async with aclosing(made.operations.flip(name)) as states:
        return [state async for state in states][-1].name


def names(made: SupervisedCluster) -> list[str]:
    """Of the groups that have workers."""
    return [group.name for group in made.view().groups]


def handle_of(made: SupervisedCluster, name: str, rank: int = 0) -> WorkerHandle:
    (group,) = (group for group in made.cluster.groups if group.name == name)
    return group.workers[rank].handle


async def state_of(made: SupervisedCluster, name: str) -> GroupState | None:
    return next((group for group in (await made.overview.state()).groups if group.name == name), None)


async def until_sound(made: SupervisedCluster) -> None:
    """All groups are ready, nothing is held or leaked, and the books add up."""

    async def held() -> list[object]:
        state = await made.overview.state()
        counts: list[object] = [*state.why_not_serving, state.num_running, state.num_queued]
        for group in state.groups:
            counts += [not group.is_ready, group.num_requests, group.num_leaked]
            if group.role == "generate":
                counts.append(group.generation is None or group.generation.num_slots - group.generation.num_free)
        return counts

    await eventually(held, lambda counts: not any(counts))


async def test_a_chain_lends_its_last_rank_and_gets_it_back() -> None:
    async with supervised() as made:
        worker = handle_of(made, "prefill-0", 1)
        assert await flip(made, "prefill-0") == "generate-2"
        assert handle_of(made, "generate-2") is worker and worker.config.lent == "prefill-0.1"
        chain, borrower = await state_of(made, "prefill-0"), await state_of(made, "generate-2")
        assert chain is not None and len(chain.endpoints) == 1 and chain.epoch == 2
        assert borrower is not None and borrower.lender == "prefill-0" and borrower.is_ready
        assert made.room.taken == {"prefill-0": NUM_RANKS, "generate-0": 1, "generate-1": 1}
        await made.ask(made.request((1, 2, 3), ANSWER))
        async with aclosing(made.operations.unflip("prefill-0")) as states:
            assert [state async for state in states][-1].name == "prefill-0"
        assert handle_of(made, "prefill-0", 1) is worker and not worker.config.lent
        assert len(made.view().prefill[0].endpoints) == NUM_RANKS
        assert made.members.orders == Orders()
        await until_sound(made)
        assert len(made.spawner.made) == NUM_RANKS + 2


async def test_an_engine_becomes_a_chain_and_an_engine_again_and_the_last_one_stays() -> None:
    async with supervised() as made:
        worker = handle_of(made, "generate-1")
        assert await flip(made, "generate-1") == "prefill-1"
        assert names(made) == ["prefill-0", "prefill-1", "generate-0"]
        assert handle_of(made, "prefill-1") is worker
        state = await made.overview.state()
        assert state.groups_away == ()
        assert state.why_degraded[0].startswith("generate-1 has lent its workers")
        with pytest.raises(UnavailableError, match="generate-0 is the only group that may generate"):
            await flip(made, "generate-0")
        with pytest.raises(UnavailableError, match="generate-1 has no workers"):
            await flip(made, "generate-1")
        assert await flip(made, "prefill-1") == "generate-1"
        assert handle_of(made, "generate-1") is worker
        assert made.members.orders == Orders()
        with pytest.raises(NotFoundError, match="generate-1 has no worker to return"):
            made.operations.unflip("generate-1")
        await until_sound(made)


@pytest.mark.parametrize("num_flips", [4, pytest.param(10, marks=pytest.mark.ci)])
async def test_roles_change_back_and_forth_under_streams_of_which_none_is_lost(num_flips: int) -> None:
    over = asyncio.Event()
    async with supervised() as made:
        async with asyncio.TaskGroup() as streams:
            asking = [streams.create_task(made.keep_asking(over)) for _ in range(3)]
            for turn in range(num_flips // 2):
                lender = ("prefill-0", "generate-1", "generate-0")[turn % 3]
                assert await flip(made, await flip(made, lender)) == lender
            over.set()
        assert all(task.result() for task in asking)
        await until_sound(made)
        assert made.members.orders == Orders()
        assert len(made.spawner.made) == NUM_RANKS + 2  # no worker was started anew


async def test_a_worker_that_does_not_serve_in_its_new_role_goes_back() -> None:
    async with supervised() as made:
        made.spawner.failures_in_new_roles = [ModelError("no memory for slots")]
        with pytest.raises(UnavailableError, match="generate-2 did not start: no memory for slots"):
            await flip(made, "prefill-0")
        assert made.members.orders == Orders()
        assert names(made) == ["prefill-0", "generate-0", "generate-1"]
        assert len(made.view().prefill[0].endpoints) == NUM_RANKS
        await until_sound(made)
        made.spawner.failures_in_new_roles = [ModelError("no memory for slots")]
        with pytest.raises(UnavailableError, match="prefill-1 did not start"):
            await flip(made, "generate-1")
        assert made.members.orders == Orders()
        assert names(made) == ["prefill-0", "generate-0", "generate-1"]
        await until_sound(made)


@pytest.mark.ci
@pytest.mark.parametrize("lender", ["prefill-0", "generate-1"])
async def test_a_borrowed_worker_that_dies_is_replaced_in_its_role_and_place(lender: str) -> None:
    async with supervised() as made:
        borrower = await flip(made, lender)
        dead = handle_of(made, borrower)
        dead.kill()
        await dead.wait()
        await eventually(lambda: state_of(made, borrower), lambda state: state is not None and state.is_ready, 60)
        new = handle_of(made, borrower)
        assert new is not dead and new.config == dead.config
        assert await flip(made, borrower) == lender
        assert made.members.orders == Orders()
        await until_sound(made)


@pytest.mark.ci
async def test_a_worker_that_is_killed_while_it_changes_its_role_is_replaced_and_the_flip_reports_it() -> None:
    async with supervised() as made:
        worker = handle_of(made, "prefill-0", 1)
        flipping = asyncio.create_task(flip(made, "prefill-0"))
        await eventually(
            lambda: state_of(made, "prefill-0"), lambda state: len(state.endpoints) == 1 if state else True, 60
        )
        worker.kill()
        outcome = (await asyncio.gather(flipping, return_exceptions=True))[0]
        assert outcome == "generate-2" or isinstance(outcome, UnavailableError)
        await until_sound(made)
        if outcome == "generate-2":  # killed as soon as it served
            assert await flip(made, "generate-2") == "prefill-0"
        assert made.members.orders == Orders()
        assert len(made.view().prefill[0].endpoints) == NUM_RANKS


@pytest.mark.ci
async def test_a_lender_that_leaves_keeps_its_room_until_its_worker_has_left_too() -> None:
    async with supervised() as made:
        assert await flip(made, "prefill-0") == "generate-2"
        await drained(made, "prefill-0")
        assert made.room.taken == {"prefill-0": NUM_RANKS, "generate-0": 1, "generate-1": 1}
        await made.ask(made.request((1, 2, 3), ANSWER))
        await made.operations.undrain("prefill-0")
        assert len(made.view().prefill[0].endpoints) == NUM_RANKS - 1
        await drained(made, "prefill-0")
        await drained(made, "generate-2")
        assert made.room.taken == {"generate-0": 1, "generate-1": 1}
        assert names(made) == ["generate-0", "generate-1"]
        assert made.members.away == ("prefill-0",)
        await made.operations.undrain("prefill-0")
        assert len(made.view().prefill[0].endpoints) == NUM_RANKS
        assert made.members.orders == Orders()


@pytest.mark.ci
async def test_a_lender_and_its_borrower_that_leave_at_once_release_their_room() -> None:
    async with supervised() as made:
        assert await flip(made, "prefill-0") == "generate-2"
        both = frozenset({"prefill-0", "generate-2"})
        made.members.keep_orders(replace(made.members.orders, drained=both, leaving=both))
        await eventually(lambda: taken(made), lambda rooms: rooms == {"generate-0", "generate-1"}, within_s=60)
        assert names(made) == ["generate-0", "generate-1"]


async def taken(made: SupervisedCluster) -> set[str]:
    """The rooms that are."""
    return {*made.room.taken}


@pytest.mark.ci
async def test_a_borrowed_worker_goes_back_when_its_group_is_drained_away() -> None:
    async with supervised() as made:
        worker = handle_of(made, "prefill-0", 1)
        assert await flip(made, "prefill-0") == "generate-2"
        await drained(made, "generate-2")
        assert handle_of(made, "prefill-0", 1) is worker
        assert made.members.orders == Orders()


async def drained(made: SupervisedCluster, name: str) -> None:
    """As `baton drain` ends."""
    async with aclosing(made.operations.drain(name, leave=True)) as states:
        async for state in states:
            assert state.is_drained


async def test_of_two_engines_that_are_flipped_at_once_one_stays() -> None:
    async with supervised() as made:
        flips = (flip(made, "generate-0"), flip(made, "generate-1"))
        outcomes = await asyncio.gather(*flips, return_exceptions=True)
        assert any(isinstance(outcome, UnavailableError) for outcome in outcomes), outcomes
        assert [name for name in names(made) if name.startswith("generate")]
        await made.ask(made.request((1, 2, 3), ANSWER))
        assert not made.members.orders.drained


async def test_a_flip_that_is_given_up_before_the_worker_could_be_spared_changes_nothing() -> None:
    async with supervised() as made:
        with made.members.hold("prefill-0"):
            async with aclosing(made.operations.flip("prefill-0")) as states:
                assert (await anext(states)).is_drained
        assert made.members.orders == Orders()
        assert names(made) == ["prefill-0", "generate-0", "generate-1"]


async def num_ready_ranks(made: SupervisedCluster) -> int:
    """Of the chain."""
    state = await state_of(made, "prefill-0")
    return len(state.endpoints) if state is not None and state.is_ready else 0


LENT = Orders(stand_ins=frozenset({"generate-2"}), lent={"generate-2": "prefill-0.1"})
RETURNING = replace(LENT, drained=LENT.stand_ins, leaving=LENT.stand_ins)


async def test_the_next_supervisor_finds_what_is_lent() -> None:
    made = SupervisedCluster()
    async with made.adopting(LENT):
        assert [group.name for group in made.cluster.groups] == ["generate-0", "generate-1", "generate-2", "prefill-0"]
        assert handle_of(made, "generate-2").config.place_name == "prefill-0.1"
        assert len(made.view().prefill[0].endpoints) == NUM_RANKS - 1
        assert made.room.taken["prefill-0"] == NUM_RANKS


async def test_the_next_supervisor_returns_what_was_on_its_way_back() -> None:
    made = SupervisedCluster()
    async with made.adopting(RETURNING):
        assert [group.name for group in made.cluster.groups] == ["generate-0", "generate-1", "prefill-0"]
        assert len(made.view().prefill[0].endpoints) == NUM_RANKS
        supervising = asyncio.create_task(made.supervise())
        assert await made.members.until(lambda: made.members.orders == Orders() or None, 60)
        supervising.cancel()
        assert len(made.spawner.made) == NUM_RANKS + 2


@pytest.mark.ci
async def test_a_rank_whose_order_is_dropped_is_started_in_its_chain() -> None:
    async with supervised() as made:
        assert await flip(made, "prefill-0") == "generate-2"
        made.members.keep_orders(Orders())
        await eventually(lambda: state_of(made, "generate-2"), lambda state: state is None, within_s=60)
        await eventually(lambda: num_ready_ranks(made), lambda number: number == NUM_RANKS, within_s=60)
        await until_sound(made)
