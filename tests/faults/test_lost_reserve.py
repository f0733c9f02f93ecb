"""A Reserve call whose answer is lost or whose stream is refused costs one attempt. It does not block a slot until its
TTL, and does not affect a worker's health."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.sampling_params import SamplingParams
from baton_lab.chaos.faults import Fault
from baton_lab.chaos.network import FaultyNetwork
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.workers.worker_poller import LEAK_S
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.clusters.fault_plans import PickedPlan
from tests.support.engines.generation import prompt
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
CONFIG = OrchestratorConfig(avoid_s=0.1, lease_ttl_s=30.0, poll_s=0.1, disaggregation="always")
TOLD_S = LEAK_S + 1.0
"""Within which a leak is found, and health says so."""
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@asynccontextmanager
async def behind(plan: PickedPlan) -> AsyncIterator[BareCluster]:
    """A cluster whose generation group is behind a network that fails by the plan, and whose leaks count at once."""
    network = FaultyNetwork(plan)
    try:
        async with cluster(num_ranks=1) as made:
            port = made.groups[0].port
            await network.open(f"127.0.0.1:{port}")
            made.fronts[port] = network.endpoint
            await made.server.stop()
            async with made.serving(CONFIG):
                made.server.orchestrator.poller._leaks_count_from_s = 0.0
                yield made
    finally:
        await network.close()


async def verdicts(made: BareCluster, over_s: float) -> list[int]:
    """What health says, each time that it says something new, over that time."""
    stub, told = health_pb2_grpc.HealthStub(made.channel), []

    async def listen() -> None:
        async for said in stub.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Orchestrator")):
            told.append(int(said.status))

    listening = asyncio.create_task(listen())
    await asyncio.wait({listening}, timeout=over_s)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    return told


@pytest.mark.parametrize(
    "faults",
    [
        {"Reserve": Fault.LOSE},
        {"Streams": Fault.REFUSE},
        pytest.param({"Reserve": Fault.LOSE, "Abort": Fault.REFUSE}, marks=pytest.mark.ci),
        pytest.param({"Reserve": Fault.TWICE}, marks=pytest.mark.ci),
    ],
)
async def test_a_lost_call_leaves_no_slot_and_health_says_serving(faults: dict[str, Fault]) -> None:
    plan = PickedPlan(faults, 0.5)
    async with behind(plan) as made:
        await eventually(made.health, lambda status: status == SERVING)
        plan.is_on = True
        listening = asyncio.create_task(verdicts(made, over_s=TOLD_S))
        answer = await made.ask(made.request(prompt(20), PARAMS))
        assert answer.end.usage.num_attempts == (1 if Fault.TWICE in faults.values() else 2)
        await made.until_empty()
        assert plan.struck.total() == len(faults)
        assert await listening == [SERVING]


async def test_what_cannot_be_aborted_is_no_leak_before_its_ttl() -> None:
    """A group that knows nothing of numbers, as an older one."""
    async with behind(PickedPlan({}, 0.0)) as made:
        await eventually(made.health, lambda status: status == SERVING)
        lease = made.lease_to_stranger()
        told = await verdicts(made, over_s=TOLD_S)
        made.groups[0].slots.abort(lease)
        assert told == [SERVING]


async def test_an_active_slot_of_nobody_ends_serving() -> None:
    async with behind(PickedPlan({}, 0.0)) as made:
        await eventually(made.health, lambda status: status == SERVING)
        table = made.groups[0].slots
        batch_slots = table.occupy(4, 8)
        assert batch_slots is not None
        try:
            await made.state()  # asks the group, which is not quiet from then on
            await eventually(made.health, lambda status: status == NOT_SERVING)
            assert (await made.state()).why_not_serving == ["group-0: 1 slots are held by no request"]
        finally:
            table.release(batch_slots[0].ref)
