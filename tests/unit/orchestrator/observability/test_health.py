"""Health says what is true, over gRPC too: no path, books that do not balance and leaks end SERVING."""

from dataclasses import replace

import pytest
from grpc_health.v1 import health_pb2

from baton.calls.cluster_state import GenerationStatus, GroupState, PrefillStatus
from baton.v1.common_pb2 import PrefixStoreStatus
from generate_workers.slots.leases import SlotState
from orchestrator.membership.view import AbsentGroup
from orchestrator.observability.state import why_degraded, why_not_serving
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.cluster import HASTY, BareCluster, cluster
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
GROUP = GroupState("g", "generate", ("h:1",), 0, True, 0, 0)
CHAIN = GroupState("p", "prefill", ("h:2",), 1, True, 0, 0)


def test_a_sound_cluster_serves_and_is_not_degraded() -> None:
    assert (why_not_serving([GROUP, CHAIN]), why_degraded([GROUP, CHAIN])) == ((), ())


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([], "no generation group is ready"),
        ([CHAIN, replace(GROUP, is_ready=False)], "no generation group is ready"),
        ([GROUP, replace(GROUP, name="x", generation=GenerationStatus(imbalance="1 is not 2"))], "x: 1 is not 2"),
        ([GROUP, replace(GROUP, name="x", num_leaked=2)], "x: 2 slots are held by no request"),
        ([GROUP, replace(CHAIN, num_leaked=1)], "p: 1 jobs are held by no request"),
    ],
)
def test_what_ends_serving(groups: list[GroupState], reason: str) -> None:
    assert why_not_serving(groups) == (reason,)


def test_what_an_earlier_life_left_does_not_end_serving() -> None:
    assert why_not_serving([replace(GROUP, num_leaked=2)], leaks_count=False) == ()


@pytest.mark.parametrize(
    ("group", "absence"),
    [
        (replace(CHAIN, is_ready=False), "p is not ready: its workers start, or are being repaired"),
        (replace(CHAIN, is_ready=False, is_drained=True), "p is drained"),
        (replace(CHAIN, is_ready=False, is_broken=True), "p gets no work for a while: attempts there failed"),
    ],
)
def test_an_absent_chain_degrades_and_it_is_said_why(group: GroupState, absence: str) -> None:
    first, second = why_degraded([group, GROUP])
    assert first.startswith(absence)
    assert second == "no prefill group is ready: generation groups prefill by themselves"
    assert len(why_degraded([group, replace(CHAIN, name="q"), GROUP])) == 1


def test_a_group_without_workers_is_said_to_have_left_or_to_start() -> None:
    absent = [AbsentGroup("p", "prefill"), AbsentGroup("x", "generate", starts=True)]
    assert why_degraded([GROUP], [*absent, replace(absent[1], name="y", error="no room")]) == (
        "p has left: `baton drain p --undo` starts it again",
        "x starts",
        "y did not start, and is tried again: no room",
        "no prefill group is ready: generation groups prefill by themselves",
    )


def test_a_group_that_has_lent_its_workers_is_not_said_to_have_left() -> None:
    absent = [AbsentGroup("g", "generate")]
    reasons = why_degraded([replace(CHAIN, name="q", lender="g"), replace(GROUP, name="h")], absent)
    assert reasons == ("g has lent its workers: `baton flip q --undo` returns that of q",)


def test_a_disk_that_is_not_used_is_said_once_for_each_group() -> None:
    store = PrefixStoreStatus(disk_fault="/disk does not answer")
    chain = replace(CHAIN, ranks={rank: PrefillStatus(prefix_store=store) for rank in (0, 1)})
    group = replace(GROUP, generation=GenerationStatus(prefix_store=PrefixStoreStatus()))
    assert why_degraded([group, chain]) == ("p keeps no prefixes on disk: /disk does not answer",)


def test_without_chains_configured_nothing_is_degraded() -> None:
    assert why_degraded([GROUP]) == ()


async def until(made: BareCluster, status: int) -> None:
    await eventually(made.health, lambda value: value == status)


async def test_health_follows_drains_of_the_last_path() -> None:
    async with cluster(num_groups=2) as made:
        await until(made, SERVING)
        made.members.drain("group-0")
        assert (await made.state()).why_not_serving == []
        made.members.drain("group-1")
        await until(made, NOT_SERVING)
        assert (await made.state()).why_not_serving == ["no generation group is ready"]
        made.members.undrain("group-0")
        await until(made, SERVING)


async def test_health_follows_the_ledger() -> None:
    async with cluster() as made:
        await until(made, SERVING)
        table = made.groups[0].slots
        table._slots[3].state = SlotState.ACTIVE  # held by nobody, and promised nothing
        await until(made, NOT_SERVING)
        (reason,) = (await made.state()).why_not_serving
        assert reason.startswith("group-0: (0, 1, 0) slots leased, active, quarantined are promised")
        assert (await made.metrics())['baton_ledger_imbalance{group="group-0"}'] == 1
        table._slots[3].state = SlotState.FREE
        await until(made, SERVING)


async def test_health_follows_leaks() -> None:
    async with cluster(config=replace(HASTY, lease_ttl_s=0.1)) as made:
        await until(made, SERVING)
        lost = made.lease_to_stranger()
        await until(made, NOT_SERVING)
        assert (await made.state()).why_not_serving == ["group-0: 1 slots are held by no request"]
        made.groups[0].slots.abort(lost)
        await until(made, SERVING)


async def test_what_a_former_orchestrator_leased_does_not_end_serving() -> None:
    async with cluster(config=OrchestratorConfig(lease_ttl_s=60.0)) as made:
        batch_slots = made.groups[0].slots.occupy(4, 8)  # a row, which no lease explains
        assert batch_slots is not None

        async def num_leaked() -> int:
            return (await made.state()).groups[-1].num_leaked

        await eventually(num_leaked, lambda count: count == 1)
        assert await made.health() == SERVING
        made.groups[0].slots.release(batch_slots[0].ref)
