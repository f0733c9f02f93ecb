"""Priority classes, tenants and deadlines over gRPC: a call's fields reach the queue, and a caller without permission
gets an error."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton import AsyncClient
from baton.errors import InvalidArgumentError, ResourceExhaustedError, UnauthenticatedError
from baton.planning.cost_model import CostModel
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.v1 import orchestrator_pb2 as pb
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import Tenant, Tenants, hash_key
from tests.support.clusters.clients import HOST, Answer
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.clusters.planners import planner_of
from tests.support.engines.generation import prompt
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
SLOW = CostModel(num_layers=10, linear_s=0.2, pair_s=0.0, kv_bytes=0)
"""Says that a token of a prompt takes two seconds."""
TENANTS = Tenants(
    (Tenant("acme", key_hashes=(hash_key("acme-key"),)), Tenant("small", max_queued_requests=1)),
    trust_metadata=True,
    require_key=True,
)
OPEN = Tenants(trust_metadata=True)
SOME_CALLS = 40
"""Of attention: they bring a stream's first tokens, and not the end of LONG."""


@pytest.fixture
async def narrow() -> AsyncIterator[BareCluster]:
    """One slot, and a queue of three."""
    async with cluster(num_slots=1, config=OrchestratorConfig(max_queued_requests=3, tenants=OPEN)) as made:
        yield made


async def ask(made: BareCluster, metadata: tuple[tuple[str, str], ...] = (), **fields: Any) -> Answer:
    """A call without a timeout of its own: gRPC rounds them, and the queue goes by deadlines."""
    answer = Answer()
    call = made.stub.Generate(made.request(prompt(10), GREEDY, **fields), metadata=metadata)
    await asyncio.wait_for(answer.drain(call), 60)
    return answer


async def occupied(made: BareCluster) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateEvent]:
    """The one slot is taken until the call is cancelled."""
    made.group_gates[0].shut(num_passes=SOME_CALLS)
    call = made.open(made.request(prompt(10), LONG))
    await Answer().read(call, 1)
    return call


async def queued(made: BareCluster, num: int) -> None:
    await eventually(made.state, lambda state: state.num_queued == num)


async def test_a_more_urgent_request_that_came_later_is_served_first(narrow: BareCluster) -> None:
    call = await occupied(narrow)
    asked = []
    for num, priority in enumerate([pb.PRIORITY_BATCH, pb.PRIORITY_UNSPECIFIED, pb.PRIORITY_INTERACTIVE], start=1):
        asked.append(asyncio.create_task(ask(narrow, priority=priority)))
        await queued(narrow, num)
    narrow.group_gates[0].open()
    call.cancel()
    batch, standard, interactive = [answer.finished for answer in await asyncio.gather(*asked)]
    assert batch is not None and standard is not None and interactive is not None
    assert interactive.timings.admitted_ns < standard.timings.admitted_ns < batch.timings.admitted_ns


async def test_a_tenants_place_in_a_full_queue_goes_to_one_that_has_less(narrow: BareCluster) -> None:
    call = await occupied(narrow)
    heavy = (("baton-tenant", "heavy"),)
    asked = []
    for num in range(1, 4):
        asked.append(asyncio.create_task(ask(narrow, heavy)))
        await queued(narrow, num)
    with pytest.raises(ResourceExhaustedError, match="3 requests wait already"):
        await ask(narrow, heavy)
    light = asyncio.create_task(ask(narrow, (("baton-tenant", "light"),)))
    with pytest.raises(ResourceExhaustedError, match="better claim") as caught:
        await asked[2]
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0
    narrow.group_gates[0].open()
    call.cancel()
    await asyncio.gather(light, *asked[:2])


async def test_a_call_is_its_keys_and_others_are_unauthenticated() -> None:
    async with cluster(num_slots=1, config=OrchestratorConfig(tenants=TENANTS)) as made:
        made.metadata = (("authorization", "Bearer acme-key"),)
        assert len((await ask(made, (("authorization", "Bearer acme-key"),))).token_ids) == 4
        async with AsyncClient(f"{HOST}:{made.server.port}", api_key="acme-key") as client:
            await client.generate(token_ids=prompt(10), params=GREEDY, priority="interactive").collect()
        for metadata, text in (
            ((("authorization", "Bearer other"),), "the API key is unknown here"),
            ((), "the call has no API key"),
            ((("baton-tenant", "acme"),), "reached by its API key only"),
        ):
            with pytest.raises(UnauthenticatedError, match=text):
                await ask(made, metadata)
        refused = made.stub.Generate(made.request(prompt(10), GREEDY), timeout=60)
        assert await refused.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_tenants_own_bound_is_told_by_name() -> None:
    small = (("baton-tenant", "small"),)
    async with cluster(num_slots=1, config=OrchestratorConfig(tenants=TENANTS)) as made:
        made.metadata = (("authorization", "Bearer acme-key"),)
        made.group_gates[0].shut(num_passes=SOME_CALLS)
        first = made.stub.Generate(made.request(prompt(10), LONG), timeout=60, metadata=small)
        await Answer().read(first, 1)
        waiting = asyncio.create_task(ask(made, small))
        await queued(made, 1)
        with pytest.raises(ResourceExhaustedError, match="tenant small may have 1 requests waiting, this makes 2"):
            await ask(made, small)
        made.group_gates[0].open()
        first.cancel()
        await waiting


async def test_an_unknown_priority_is_refused(narrow: BareCluster) -> None:
    with pytest.raises(InvalidArgumentError, match="priority = 7 is unknown"):
        await ask(narrow, priority=7)


async def test_a_deadline_before_the_predicted_first_token_is_refused_at_once() -> None:
    async with cluster(planner=planner_of(SLOW)) as made:
        made.group_gates[0].shut(num_passes=SOME_CALLS)
        first = made.open(made.request(prompt(10), LONG))  # alone it finds out for itself
        await Answer().read(first, 1)
        before_s = SystemClock().now_s()
        with pytest.raises(ResourceExhaustedError, match="first token is predicted after .* deadline is in") as caught:
            await ask(made, deadline_ms=8000)
        assert SystemClock().now_s() - before_s < 6
        assert caught.value.retry_after_s is not None
        made.group_gates[0].open()
        first.cancel()


async def test_a_stream_that_is_resumed_is_refused_by_no_prediction() -> None:
    async with cluster(planner=planner_of(SLOW)) as made:
        first = made.open(made.request(prompt(10), LONG))
        await Answer().read(first, 1)
        known = pb.GenerateRequest().outputs
        known.add(token_ids=[5])
        answer = await ask(made, deadline_ms=4000, outputs=known)
        assert answer.indices == [1, 2, 3]
        first.cancel()
