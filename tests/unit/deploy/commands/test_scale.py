"""`baton scale` as a user types it, against real workers that a real roster starts and ends."""

import asyncio

import pytest

from deploy.cli import main
from deploy.config.environment import SECRET_VARIABLE
from orchestrator.membership.view import Orders
from tests.support.clusters.supervision import SupervisedCluster, supervised
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.text)


async def scale(cluster: SupervisedCluster, *arguments: str) -> int:
    return await asyncio.to_thread(main, ["scale", *arguments, "--target", cluster.target])


def serving(cluster: SupervisedCluster) -> list[str]:
    """Names of the groups that have workers."""
    return [group.name for group in cluster.view().groups]


async def test_a_pool_gets_further_groups_and_gives_them_back(capsys: pytest.CaptureFixture[str]) -> None:
    async with supervised() as cluster:
        cluster.room.num_places += 1
        assert await scale(cluster, "generate", "3") == 0
        assert serving(cluster) == ["prefill-0", "generate-0", "generate-1", "generate-2"]
        assert await scale(cluster, "generate", "1") == 0
        assert serving(cluster) == ["prefill-0", "generate-0"]
        assert cluster.members.orders.stand_ins == frozenset()
        assert await scale(cluster, "generate", "2") == 0
        assert serving(cluster) == ["prefill-0", "generate-0", "generate-1"]
        assert cluster.members.orders == Orders()
    assert capsys.readouterr().out.splitlines() == [
        *("generate-2 has started", "generate has 3 groups that may get work"),
        *("generate-2 has left", "generate-1 has left", "generate has 1 group that may get work"),
        *("generate-1 may get work again", "generate has 2 groups that may get work"),
    ]


async def test_a_group_that_there_is_no_room_for_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    async with supervised() as cluster:
        assert await scale(cluster, "generate", "3") == 1
        assert serving(cluster) == ["prefill-0", "generate-0", "generate-1"]
    assert "no room for generate-2" in capsys.readouterr().err


async def test_a_pool_of_prefill_groups_may_be_empty_for_a_while() -> None:
    async with supervised() as cluster:
        assert await scale(cluster, "prefill", "0") == 0
        assert serving(cluster) == ["generate-0", "generate-1"]
        assert await scale(cluster, "prefill", "1") == 0
        assert serving(cluster) == ["prefill-0", "generate-0", "generate-1"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("generate", "0"), "0 groups are too few for the pool generate: use 1 or more"),
        (("prefill", "-1"), "-1 groups are too few for the pool prefill: use 0 or more"),
        (("prefill", "1", "--timeout", "0"), "--timeout 0 is out of range"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", *arguments]) == 2
    assert reason in capsys.readouterr().err
