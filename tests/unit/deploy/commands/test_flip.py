"""`baton flip` as a user types it, against real workers that a real roster starts and ends."""

import pytest

from deploy.commands.status import groups_table
from orchestrator.membership.view import Orders
from tests.support.clusters.supervision import NUM_RANKS, supervised
from tests.support.wire.commands import Baton

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("known")]


async def test_a_worker_changes_its_role_is_shown_and_goes_back(baton: Baton) -> None:
    async with supervised() as made:
        flipped = await baton.run_beside(f"flip prefill-0 --target {made.target}")
        assert (
            flipped.out == "generate-2 serves with a worker of prefill-0: `baton flip generate-2 --undo` returns it\n"
        )
        assert list(made.endpoints()) == ["prefill-0", "generate-0", "generate-1", "generate-2"]
        column = groups_table(await made.overview.state()).columns[0]
        assert "generate-2 (lent by prefill-0)" in [*column.cells]
        undone = await baton.run_beside(f"flip prefill-0 --undo --target {made.target}")
        assert undone.out == "prefill-0 has its worker again\n"
        assert len(made.endpoints()["prefill-0"]) == NUM_RANKS
        assert made.members.orders == Orders()


async def test_what_cannot_be_is_refused_in_one_line(baton: Baton) -> None:
    async with supervised() as made:
        with made.members.hold("prefill-0"):
            for arguments, refusal in (
                ("generate-7", "there is no group generate-7: name one of generate-0, generate-1, prefill-0"),
                ("generate-0 --undo", "generate-0 has no worker to return: name a group that has borrowed or lent one"),
                ("prefill-0 --timeout 0.5", "the role of prefill-0 has not changed after 0.5 s"),
            ):
                run = await baton.run_beside(f"flip {arguments} --target {made.target}")
                assert run.status == 1 and refusal in run.err
        assert made.members.orders.lent == {}


async def test_a_reload_of_a_group_gets_what_that_has_lent_back(baton: Baton) -> None:
    async with supervised() as made:
        at = f"--target {made.target}"
        assert (await baton.run_beside(f"flip generate-1 {at}")).status == 0
        refused = await baton.run_beside(f"reload --group prefill-1 {at}")
        assert refused.status == 1 and "prefill-1 has a worker of generate-1: reload that" in refused.err
        before = made.spawner.made[:]
        assert (await baton.run_beside(f"flip prefill-0 {at}")).status == 0
        assert (await baton.run_beside(f"reload --group prefill-0 {at}")).status == 0
        assert list(made.endpoints()) == ["prefill-0", "prefill-1", "generate-0"]
        assert len(made.endpoints()["prefill-0"]) == len(made.spawner.made) - len(before) == NUM_RANKS
