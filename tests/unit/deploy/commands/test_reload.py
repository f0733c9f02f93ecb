"""`baton reload` as a user types it, against real workers that a real roster starts and ends, while streams run."""

import asyncio
from pathlib import Path

import pytest

from baton.errors import ModelError
from orchestrator.membership.view import AbsentGroup, Orders
from tests.support.clusters.supervision import ANSWER, NAMES, supervised
from tests.support.engines.generation import prompt, reference_ids
from tests.support.models.tiny_models import random_decoder
from tests.support.wire.commands import Baton

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("known")]


async def test_all_groups_get_new_workers_and_no_request_is_lost(baton: Baton) -> None:
    over = asyncio.Event()
    async with supervised() as made:
        before = made.endpoints()
        async with asyncio.TaskGroup() as streams:
            asking = [streams.create_task(made.keep_asking(over)) for _ in range(3)]
            reloaded = await baton.run_beside(f"reload --target {made.target}")
            over.set()
        told = [f"{name} has new workers: {number} of 3 groups" for number, name in enumerate(NAMES, 1)]
        assert (reloaded.status, reloaded.out.splitlines()) == (0, told)
        assert all(task.result() for task in asking)
        after = made.endpoints()
        assert list(after) == list(before)
        assert not {each for group in before.values() for each in group} & {
            e for group in after.values() for e in group
        }
        assert made.members.orders == Orders()


async def test_the_last_group_that_generates_is_replaced_behind_a_stand_in(baton: Baton) -> None:
    async with supervised() as made:
        await baton.run_beside(f"drain generate-1 --target {made.target}")
        before = made.endpoints()
        assert (await baton.run_beside(f"reload --target {made.target} --group generate-0")).status == 0
        after = made.endpoints()
        assert list(after) == ["prefill-0", "generate-0"]
        assert after["generate-0"] != before["generate-0"]
        assert made.members.orders.drained == {"generate-1"} == made.members.orders.leaving
        assert "generate-2 has left" in made.reports
        await made.room.reserve("stranger", 1)
        told = await baton.run_beside(f"reload --target {made.target}")
        assert (told.status, told.out) == (1, "prefill-0 has new workers: 1 of 2 groups\n")
        assert told.err.splitlines() == [
            f"the cluster still serves; to continue: `baton reload --target {made.target} --group generate-0`",
            "baton: generate-0 is the only group that generates, and none can stand in for it (generate-2 did not"
            " start: no room for generate-2): make room for one",
        ]
        assert made.endpoints()["generate-0"] == after["generate-0"]
        assert len((await made.ask(made.request(prompt(9), ANSWER))).token_ids) == ANSWER.max_tokens
        await made.room.release("stranger")


async def test_other_weights_are_taken_group_by_group_and_never_mixed(baton: Baton) -> None:
    old, new, over = random_decoder(), random_decoder(seed=9), asyncio.Event()
    async with supervised() as made:
        made.spawner.decoders["other"] = new
        answers = [reference_ids(decoder, prompt(9), ANSWER) for decoder in (old, new)]
        assert answers[0] != answers[1]

        async def keep_checking() -> None:
            while not over.is_set():
                assert (await made.ask(made.request(prompt(9), ANSWER))).token_ids in answers

        async with asyncio.TaskGroup() as streams:
            streams.create_task(keep_checking())
            assert (await baton.run_beside(f"reload --target {made.target} --model other")).status == 0
            over.set()
        assert (await made.ask(made.request(prompt(9), ANSWER))).token_ids == answers[1]
        assert {group.layout_fingerprint for group in made.view().groups} == {new.layout.fingerprint}


async def test_a_group_that_cannot_be_started_anew_comes_back_with_what_it_had(baton: Baton) -> None:
    async with supervised() as made:
        made.spawner.failures = [ModelError("no such model")]
        told = await baton.run_beside(f"reload --target {made.target} --group generate-1 --model absent")
        assert told.status == 1
        assert told.err.splitlines() == [
            "the cluster still serves; to continue: "
            f"`baton reload --target {made.target} --model absent --group generate-1`",
            "to leave generate-1 as it is: `baton drain generate-1 --undo`",
            "baton: generate-1 did not start: no such model",
        ]
        members = made.members
        assert await members.until(lambda: members.is_present("generate-1") or None, 60)
        assert members.orders == Orders()
        assert made.spawner.made[-1].config.place.model_folder == Path()


async def test_a_group_that_cannot_be_started_may_be_sent_away_again(baton: Baton) -> None:
    async with supervised() as made:
        command = f"drain generate-1 --target {made.target}"
        assert (await baton.run_beside(command)).status == 0
        made.spawner.failures = [ModelError("no such model")] * 1000
        undone = await baton.run_beside(f"{command} --undo")
        assert (undone.status, undone.err) == (1, "baton: generate-1 did not start: no such model\n")
        assert (await baton.run_beside(command)).status == 0
        assert made.members.absence("generate-1") == AbsentGroup("generate-1", "generate")
        assert made.members.orders.leaving == {"generate-1"}
