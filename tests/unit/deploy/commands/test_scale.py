"""`baton scale` as a user types it, against real workers that a real roster starts and ends."""

import pytest

from orchestrator.membership.view import Orders
from tests.support.clusters.supervision import SupervisedCluster, supervised
from tests.support.wire.commands import Baton

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("known")]


def serving(cluster: SupervisedCluster) -> list[str]:
    """Names of the groups that have workers."""
    return [group.name for group in cluster.view().groups]


async def test_a_pool_gets_further_groups_and_gives_them_back(baton: Baton) -> None:
    async with supervised() as cluster:
        cluster.room.num_places += 1
        for num_groups, names, told in (
            (3, ["generate-0", "generate-1", "generate-2"], "generate-2 has started, generate has 3 groups"),
            (1, ["generate-0"], "generate-2 has left, generate-1 has left, generate has 1 group"),
            (2, ["generate-0", "generate-1"], "generate-1 may get work again, generate has 2 groups"),
        ):
            run = await baton.run_beside(f"scale generate {num_groups} --target {cluster.target}")
            assert (run.status, run.out.splitlines()) == (0, f"{told} that may get work".split(", "))
            assert serving(cluster) == ["prefill-0", *names]
        assert cluster.members.orders == Orders()


async def test_a_group_that_there_is_no_room_for_is_refused(baton: Baton) -> None:
    async with supervised() as cluster:
        run = await baton.run_beside(f"scale generate 3 --target {cluster.target}")
        assert run.status == 1 and "no room for generate-2" in run.err
        assert serving(cluster) == ["prefill-0", "generate-0", "generate-1"]


async def test_a_pool_of_prefill_groups_may_be_empty_for_a_while(baton: Baton) -> None:
    async with supervised() as cluster:
        for num_groups, chains in ((0, []), (1, ["prefill-0"])):
            run = await baton.run_beside(f"scale prefill {num_groups} --target {cluster.target}")
            assert (run.status, serving(cluster)) == (0, [*chains, "generate-0", "generate-1"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("generate 0", "0 groups are too few for the pool generate: use 1 or more"),
        ("prefill -1", "-1 groups are too few for the pool prefill: use 0 or more"),
        ("prefill 1 --timeout 0", "--timeout 0 is out of range"),
    ],
)
def test_numbers_that_cannot_be_are_refused(arguments: str, reason: str, baton: Baton) -> None:
    assert reason in baton.refusal(f"scale {arguments}")
