"""Groups leave and come back one by one while the others serve, as orders say, and whatever fails on the way."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.errors import ModelError, UnavailableError
from deploy.groups.group import WorkerGroup
from orchestrator.membership.members import Membership
from orchestrator.membership.view import AbsentGroup, GenerationGroup, Orders
from tests.support.clusters.supervision import NUM_RANKS, SupervisedCluster, supervised
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

LEFT = AbsentGroup("generate-1", "generate")


async def until(made: SupervisedCluster, *absent: AbsentGroup) -> None:
    """The orchestrator knows that these are absent, and the others are there."""
    members: Membership = made.members
    assert await members.until(lambda: True if members.present.absent == absent else None, 60), members.present


async def send_away(made: SupervisedCluster, name: str) -> None:
    """As somebody drains it, who has seen that it has nothing left to do."""
    made.members.drain(name)
    made.members.dismiss(name)
    await until(made, AbsentGroup(name, name.partition("-")[0]))


async def test_a_group_leaves_and_its_place_is_given_back_while_the_others_serve() -> None:
    async with supervised(orchestrator=False) as made:
        before = made.view()
        gone = made.cluster.generation[1].workers[0].handle
        await send_away(made, "generate-1")
        assert gone.ended
        assert made.room.taken == {"prefill-0": NUM_RANKS, "generate-0": 1}
        after = made.members.present
        assert (after.prefill, after.generation) == (before.prefill, before.generation[:1])
        assert made.reports[-1] == "generate-1 has left"
        assert not any("ended with" in line for line in made.reports)


async def test_a_group_that_left_comes_back_as_another_life_and_is_watched() -> None:
    async with supervised(orchestrator=False) as made:
        before = made.view().generation
        await send_away(made, "generate-1")
        made.members.undrain("generate-1")
        await until(made)
        after = made.members.view.generation
        assert [group.name for group in after] == ["generate-0", "generate-1"]
        assert after[0] == before[0] and after[1].endpoint != before[1].endpoint and after[1].ready
        made.cluster.generation[1].workers[0].handle.kill()
        await made.cluster.generation[1].workers[0].handle.wait()
        made.cluster.suspect()
        await made.cluster.until_ready(60)
        assert made.members.present.generation[1].endpoint != after[1].endpoint


async def test_a_chain_leaves_and_comes_back_linked() -> None:
    async with supervised(orchestrator=False) as made:
        await send_away(made, "prefill-0")
        assert not made.members.is_present("prefill-0")
        made.members.undrain("prefill-0")
        await until(made)
        (chain,) = made.members.present.prefill
        assert chain.ready and len(chain.endpoints) == NUM_RANKS and chain.epoch == 1


async def test_an_order_that_is_taken_back_at_once_is_not_carried_out() -> None:
    async with supervised(orchestrator=False) as made:
        endpoint = made.view().generation[1].endpoint
        made.members.drain("generate-1")
        made.members.dismiss("generate-1")
        made.members.undrain("generate-1")
        await send_away(made, "generate-0")  # a later order, which is carried out
        assert [group.endpoint for group in made.members.view.generation] == [endpoint]


async def test_a_group_that_cannot_be_started_is_told_and_tried_again() -> None:
    async with supervised(orchestrator=False) as made:
        await send_away(made, "generate-1")
        made.spawner.failures = [ModelError("no such model"), ModelError("not yet")]
        made.members.undrain("generate-1")
        await until(made, AbsentGroup("generate-1", "generate", starts=True, error="no such model"))
        await until(made)
        assert [line for line in made.reports if "could not be started" in line] == [
            "generate-1 could not be started (no such model): next try in 0.1 s",
            "generate-1 could not be started (not yet): next try in 0.2 s",
        ]
        assert made.members.view.generation[1].ready


async def test_without_room_a_group_waits_until_it_is_not_wanted_any_more() -> None:
    async with supervised(orchestrator=False) as made:
        await send_away(made, "generate-1")
        await made.room.reserve("stranger", 1)
        made.members.undrain("generate-1")
        await until(made, AbsentGroup("generate-1", "generate", starts=True, error="no room for generate-1"))
        await send_away(made, "generate-1")
        await made.room.release("stranger")


@pytest.mark.parametrize("undone", [False, True])
async def test_a_group_that_could_not_be_ended_is_ended_again_or_starts_anew(
    undone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(orchestrator=False) as made:
        before = made.view().generation[1]
        release = made.room.release

        async def fail(group: str) -> None:
            monkeypatch.setattr(made.room, "release", release)
            if undone:
                made.members.undrain(group)
            raise UnavailableError("the room is not there")

        monkeypatch.setattr(made.room, "release", fail)
        made.members.drain("generate-1")
        made.members.dismiss("generate-1")
        if undone:
            assert await made.members.until(lambda: is_another(made, before) or None, 60)
        else:
            await until(made, LEFT)
            assert "generate-1" not in made.room.taken


def is_another(made: SupervisedCluster, before: GenerationGroup) -> bool:
    """The group of that name is there and ready in a later incarnation."""
    present = [group for group in made.members.present.generation if group.name == before.name]
    return any(group.ready and group.incarnation != before.incarnation for group in present)


async def test_the_next_supervisor_finds_those_that_stay_and_ends_what_is_left_of_those_that_left() -> None:
    made = SupervisedCluster()
    await made.room.reserve("generate-1", 1)  # the former supervisor was killed before it gave that back
    async with made.adopting(away("generate-1")):
        assert [group.name for group in made.cluster.groups] == ["generate-0", "prefill-0"]
        assert made.roster.absent == (LEFT,)
        assert "generate-1" not in made.room.taken


async def test_a_next_life_goes_on_with_what_comes_up_and_tries_the_others_again() -> None:
    made = SupervisedCluster()
    made.spawner.failures = [ModelError("first")]
    async with made.adopting(away("prefill-0")):
        assert [group.name for group in made.cluster.groups] == ["generate-1"]
        assert made.roster.absent[0] == AbsentGroup("generate-0", "generate", starts=True, error="first")
        async with supervising(made):
            await until(made, AbsentGroup("prefill-0", "prefill"))


async def test_a_next_life_for_which_nothing_comes_up_tries_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SupervisedCluster()
    made.spawner.failures = [ModelError("first"), ModelError("second")]
    make = made.make

    def fail(name: str, orders: Orders) -> WorkerGroup:
        monkeypatch.setattr(made.roster, "_make", make)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(made.roster, "_make", fail)  # what is left of prefill-0 cannot be found
    async with made.adopting(away("prefill-0")):
        assert not made.cluster.groups
        assert [group.error for group in made.roster.absent] == ["first", "second"]
        async with supervising(made):
            await until(made, AbsentGroup("prefill-0", "prefill"))
        assert [group.name for group in made.cluster.groups] == ["generate-0", "generate-1"]


@asynccontextmanager
async def supervising(made: SupervisedCluster) -> AsyncIterator[None]:
    """The supervisor exchanges heartbeats with the orchestrator meanwhile."""
    task = asyncio.create_task(made.supervise())
    yield
    task.cancel()


def away(name: str) -> Orders:
    return Orders(drained=frozenset({name}), leaving=frozenset({name}))


async def test_a_stand_in_comes_and_leaves_for_good() -> None:
    async with supervised(orchestrator=False) as made:
        await send_away(made, "generate-1")
        assert made.members.stand_in("generate-0") == "generate-2"
        assert await made.members.until(lambda: made.members.is_present("generate-2") or None, 60)
        assert made.room.taken == {"prefill-0": NUM_RANKS, "generate-0": 1, "generate-2": 1}
        made.members.drain("generate-2")
        made.members.dismiss("generate-2")
        assert await made.members.until(lambda: made.members.orders == away("generate-1") or None, 60)
        await until(made, LEFT)
        assert "generate-2" not in made.room.taken


async def test_a_stand_in_that_is_given_up_is_forgotten_once_it_is_away() -> None:
    async with supervised(orchestrator=False) as made:
        made.room.num_places += 1
        made.members.stand_in("generate-0")
        await until(made, AbsentGroup("generate-2", "generate", starts=True))
        made.members.give_up("generate-2")
        kept = made.members.orders
        assert kept.stand_ins == kept.leaving == frozenset({"generate-2"})  # a next supervisor would end it
        assert await made.members.until(lambda: made.members.orders == Orders() or None, 60)
        await until(made)
        assert "generate-2" not in made.room.taken


async def test_a_stand_in_that_is_given_up_while_it_starts_is_not_kept() -> None:
    async with supervised(orchestrator=False) as made:
        made.room.num_places += 1
        made.members.stand_in("generate-0")
        await until(made, AbsentGroup("generate-2", "generate", starts=True))
        made.members.keep_orders(Orders())
        assert await made.members.until(lambda: "generate-2" not in made.room.taken or None, 60)
        await until(made)
        assert [group.name for group in made.cluster.groups] == ["generate-0", "generate-1", "prefill-0"]


async def test_groups_may_load_another_model_and_are_seen_with_its_layout() -> None:
    async with supervised(orchestrator=False) as made:
        before = made.members.present.generation[0].layout_fingerprint
        await send_away(made, "generate-1")
        made.spawner.decoders["generate-1"] = random_decoder(num_kv_heads=4)
        made.members.undrain("generate-1", "other")
        await until(made)
        view = made.members.view
        assert [group.layout_fingerprint == before for group in view.generation] == [True, False]
        assert [view.chains_for(group).prefill == view.prefill for group in view.generation] == [True, False]
        made.spawner.decoders["prefill-0.0"] = made.spawner.decoders["generate-1"]
        await send_away(made, "prefill-0")
        made.members.undrain("prefill-0")
        assert await made.members.until(lambda: error_of(made, "prefill-0"), 60)
        assert "workers differ in KV layout" in (error_of(made, "prefill-0") or "")
        await send_away(made, "prefill-0")


def error_of(made: SupervisedCluster, name: str) -> str | None:
    absence = made.members.absence(name)
    return absence.error or None if absence is not None else None
