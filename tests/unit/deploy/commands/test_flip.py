"""`baton flip` as a user types it, against real workers that a real roster starts and ends."""

import asyncio

import pytest

from deploy.cli import main
from deploy.commands.status import groups_table
from deploy.config.environment import SECRET_VARIABLE
from orchestrator.membership.view import Orders
from tests.support.clusters.supervision import NUM_RANKS, SupervisedCluster, supervised
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.text)


async def run(made: SupervisedCluster, *arguments: str) -> int:
    return await asyncio.to_thread(main, [*arguments, "--target", made.target])


async def test_a_worker_changes_its_role_is_shown_and_goes_back(capsys: pytest.CaptureFixture[str]) -> None:
    async with supervised() as made:
        assert await run(made, "flip", "prefill-0") == 0
        assert list(made.endpoints()) == ["prefill-0", "generate-0", "generate-1", "generate-2"]
        column = groups_table(await made.overview.state()).columns[0]
        assert "generate-2 (lent by prefill-0)" in [*column.cells]
        assert await run(made, "flip", "prefill-0", "--undo") == 0
        assert len(made.endpoints()["prefill-0"]) == NUM_RANKS
        assert made.members.orders == Orders()
    assert capsys.readouterr().out.splitlines() == [
        "generate-2 serves with a worker of prefill-0: `baton flip generate-2 --undo` returns it",
        "prefill-0 has its worker again",
    ]


async def test_what_cannot_be_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with supervised() as made:
        assert await run(made, "flip", "generate-7") == 1
        assert await run(made, "flip", "generate-0", "--undo") == 1
        with made.members.hold("prefill-0"):
            assert await run(made, "flip", "prefill-0", "--timeout", "0.5") == 1
        assert made.members.orders.lent == {}
    first, second, third = capsys.readouterr().err.splitlines()
    assert "there is no group generate-7: name one of generate-0, generate-1, prefill-0" in first
    assert "generate-0 has no worker to return: name a group that has borrowed or lent one" in second
    assert "no role has changed at prefill-0 after 0.5 s" in third


async def test_a_reload_of_a_group_gets_what_that_has_lent_back(capsys: pytest.CaptureFixture[str]) -> None:
    async with supervised() as made:
        assert await run(made, "flip", "generate-1") == 0
        assert await run(made, "reload", "--group", "prefill-1") == 1
        assert "prefill-1 has a worker of generate-1: reload that" in capsys.readouterr().err
        before = made.spawner.made[:]
        assert await run(made, "flip", "prefill-0") == 0
        assert await run(made, "reload", "--group", "prefill-0") == 0
        assert list(made.endpoints()) == ["prefill-0", "prefill-1", "generate-0"]
        assert len(made.endpoints()["prefill-0"]) == len(made.spawner.made) - len(before) == NUM_RANKS
