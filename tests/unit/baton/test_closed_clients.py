"""Closing a client, from wherever: each stream and call of it ends, with an error that says so."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import pytest

from baton import AsyncClient, AsyncStream, Client, Reconnect, Stream
from baton.calls.requests import PromptInput, make_request
from baton.calls.resume import ServerState, StreamState
from baton.errors import RequestCancelledError
from baton.process.clock import SystemClock
from baton.types import FinishReason
from baton.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from tests.support.clusters.scripted_orchestrator import MODEL, Context, Fault, ScriptedOrchestrator, serving
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

PATIENT = Reconnect(first_delay_s=7200.0, max_delay_s=7200.0)
WAIT_S = 60.0
Anyone = Client | AsyncClient


def made_in_a_thread(target: str) -> Anyone:
    return Client(target, reconnect=PATIENT)


def made_on_the_loop(target: str) -> Anyone:
    return AsyncClient(target, reconnect=PATIENT)


@pytest.fixture(params=[made_in_a_thread, made_on_the_loop], ids=["threads", "asyncio"])
def make(request: pytest.FixtureRequest) -> Callable[[str], Anyone]:
    """Makes each kind of client."""
    kind: Callable[[str], Anyone] = request.param
    return kind


async def close(client: Anyone) -> None:
    if isinstance(client, AsyncClient):
        await client.close()
    else:
        client.close()


async def answer(client: Anyone, method: str) -> object:
    """What either kind says."""
    said = getattr(client, method)()
    return await said if isinstance(client, AsyncClient) else said


def collecting(stream: Stream | AsyncStream) -> Awaitable[object]:
    """Iterates, in a task of its own."""
    if isinstance(stream, AsyncStream):
        return asyncio.create_task(stream.collect())
    return asyncio.create_task(asyncio.to_thread(stream.collect))


async def test_whoever_iterates_is_told(make: Callable[[str], Anyone]) -> None:
    service = ScriptedOrchestrator([Fault(after=1, hang=True)])
    async with serving(service) as target:
        client = make(target)
        stream = client.generate("Once", request_id="mine")
        reading = collecting(stream)
        await asyncio.wait_for(service.hanging.wait(), WAIT_S)
        await close(client)
        with pytest.raises(RequestCancelledError, match="mine was cancelled: its client was closed"):
            await asyncio.wait_for(reading, WAIT_S)
        await asyncio.wait_for(service.cancelled.wait(), WAIT_S)


@pytest.mark.parametrize(("closes", "told"), [(True, "its client was closed"), (False, "cancelled by its client")])
async def test_a_stream_that_waits_for_its_next_attempt_ends_without_it(
    make: Callable[[str], Anyone], closes: bool, told: str
) -> None:
    """It would wait for hours before it connects again."""
    service = ScriptedOrchestrator([Fault(after=1, hang=True)])
    async with AsyncExitStack() as stack:
        async with serving(service) as target:
            client = make(target)
            stack.push_async_callback(close, client)
            stream = client.generate("Once")
            stack.callback(stream.cancel)  # ends the thread of a failing test
            reading = collecting(stream)
            await asyncio.wait_for(service.hanging.wait(), WAIT_S)

        async def num_resumes() -> int:
            return stream.output.num_resumes

        await eventually(num_resumes, lambda count: count == 1, WAIT_S)
        if closes:
            await close(client)
        else:
            stream.cancel()
        with pytest.raises(RequestCancelledError, match=told):
            await asyncio.wait_for(reading, WAIT_S)


async def test_a_stream_that_nobody_reads_ends_too(make: Callable[[str], Anyone]) -> None:
    service = ScriptedOrchestrator([Fault(hang=True)])
    async with serving(service) as target:
        client = make(target)
        stream = client.generate("Once")
        await asyncio.wait_for(service.hanging.wait(), WAIT_S)
        await close(client)
        await asyncio.wait_for(service.cancelled.wait(), WAIT_S)
        assert stream.finish is FinishReason.CANCELLED
        with pytest.raises(RequestCancelledError, match="its client was closed"):
            await asyncio.wait_for(collecting(stream), WAIT_S)


async def test_a_closed_client_refuses_requests(make: Callable[[str], Anyone]) -> None:
    client = make("127.0.0.1:1")
    await close(client)
    await close(client)
    with pytest.raises(RequestCancelledError, match="the client of 127.0.0.1:1 is closed"):
        client.generate("Once")
    for name in ("model", "cluster_state"):
        with pytest.raises(RequestCancelledError, match="the client of 127.0.0.1:1 is closed"):
            await answer(client, name)


@dataclass
class Silent(ScriptedOrchestrator):
    """Says nothing of its model."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def GetModel(self, request: orchestrator_pb2.GetModelRequest, context: Context) -> orchestrator_pb2.Model:
        """Waits until cancelled."""
        self.asked.set()
        await asyncio.Event().wait()
        return MODEL


async def test_whoever_awaits_an_answer_is_told() -> None:
    service = Silent()
    async with serving(service) as target:
        client = AsyncClient(target)
        asking = asyncio.create_task(client.model(timeout_s=WAIT_S))
        await asyncio.wait_for(service.asked.wait(), WAIT_S)
        await client.close()
        with pytest.raises(RequestCancelledError, match="is closed"):
            await asyncio.wait_for(asking, WAIT_S)


async def test_cancelling_the_task_that_awaits_an_answer_cancels_it() -> None:
    service = Silent()
    async with serving(service) as target, AsyncClient(target) as client:
        asking = asyncio.create_task(client.model(timeout_s=WAIT_S))
        await asyncio.wait_for(service.asked.wait(), WAIT_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_call_that_grpc_cancels_does_not_cancel_the_task() -> None:
    """Whoever closed the channel: the failure is the stream's, and a task group sees it."""
    service = ScriptedOrchestrator([Fault(hang=True)])
    async with serving(service) as target:
        channel = grpc.aio.insecure_channel(target)
        stub = orchestrator_pb2_grpc.OrchestratorStub(channel)
        state = StreamState(make_request(PromptInput("Once"), None, {}), ServerState(target), PATIENT, SystemClock())
        stream = AsyncStream(state, lambda state: stub.Generate(state.next_request()))

        async def close_while_it_reads() -> None:
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
                group.create_task(stream.collect())
                await service.hanging.wait()
                await channel.close()

        with pytest.raises(ExceptionGroup) as caught:
            await close_while_it_reads()
        assert caught.group_contains(RequestCancelledError, match="its client was closed")
