"""Connections are shared, kept while used, and closed when their worker is gone; errors say whose fault they are."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.errors import UnavailableError
from baton.sampling_params import SamplingParams
from baton.transport.channel import make_server
from baton.types import RequestId, StreamNumber
from baton.v1 import common_pb2, generate_pb2, generate_pb2_grpc
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from orchestrator.workers.client import Clients
from tests.support.wire.rpc import listening
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

RECORD = RequestRecord.of(Request(RequestId("r"), (1, 2), SamplingParams()), received_ns=0)
NUMBER = StreamNumber(1)


class Group(generate_pb2_grpc.GenerationGroupServicer):
    """A generation group whose streams bring one token and then nothing, until they are released to end."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def Streams(
        self,
        commands: AsyncIterator[generate_pb2.StreamCommand],
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> AsyncIterator[generate_pb2.StreamEvents]:
        opened = (await anext(commands)).open
        event = generate_pb2.TokenEvent(index=0, text=opened.request_id)
        yield generate_pb2.StreamEvents(events=[generate_pb2.StreamEvent(number=opened.number, event=event)])
        await self.released.wait()
        end = generate_pb2.StreamEvent(number=opened.number, end=generate_pb2.StreamEnd())
        yield generate_pb2.StreamEvents(events=[end])

    async def Cancel(
        self, request: generate_pb2.CancelRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> generate_pb2.CancelReply:
        return generate_pb2.CancelReply()

    async def GetStatus(
        self, request: generate_pb2.GenerationStatusRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> generate_pb2.GenerationStatus:
        return generate_pb2.GenerationStatus(num_slots=4, num_free=3, num_bytes_held=100)

    async def ListPrefixBlocks(
        self, request: common_pb2.ListPrefixBlocksRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> common_pb2.ListPrefixBlocksReply:
        return common_pb2.ListPrefixBlocksReply()


class Served:
    """The group's server, and clients to reach it with."""

    def __init__(self, group: Group, server: grpc.aio.Server, endpoint: str) -> None:
        self.group = group
        self.server = server
        self.endpoint = endpoint
        self.clients = Clients(SECRET)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server, group = make_server(), Group()
    generate_pb2_grpc.add_GenerationGroupServicer_to_server(group, server)
    async with listening(server) as port:
        yield (made := Served(group, server, f"127.0.0.1:{port}"))
        await made.clients.prune(())


async def test_a_worker_is_connected_to_once(served: Served) -> None:
    with served.clients.use(served.endpoint) as first, served.clients.use(served.endpoint) as second:
        assert first is second
        assert (await first.generation_status(5)).num_free == 3


async def test_a_connection_in_use_survives_its_worker_s_absence(served: Served) -> None:
    with served.clients.use(served.endpoint) as worker:
        stream = worker.stream(RECORD, NUMBER, OrchestratorConfig(), None)
        assert (await stream.read()).text == "r"
        await served.clients.prune(())
        assert (await worker.generation_status(5)).num_slots == 4
        stream.cancel()
    with served.clients.use(served.endpoint) as again:
        assert again is worker


async def test_a_connection_to_a_worker_that_is_gone_is_closed(served: Served) -> None:
    with served.clients.use(served.endpoint) as worker:
        await worker.generation_status(5)
    await served.clients.prune({"elsewhere:1"})
    with served.clients.use(served.endpoint) as again:
        assert again is not worker


async def test_a_stream_that_just_ends_is_the_worker_s_failure(served: Served) -> None:
    with served.clients.use(served.endpoint) as worker:
        stream = worker.stream(RECORD, NUMBER, OrchestratorConfig(), None)
        await stream.read()
        served.group.released.set()
        with pytest.raises(UnavailableError, match="without a last event"):
            await stream.read()


async def test_a_worker_that_stops_is_unavailable(served: Served) -> None:
    with served.clients.use(served.endpoint) as worker:
        stream = worker.stream(RECORD, NUMBER, OrchestratorConfig(), None)
        await stream.read()
        reading = asyncio.create_task(stream.read())
        await served.server.stop(0)
        with pytest.raises(UnavailableError):
            await reading


async def test_a_cancelled_read_is_cancelled(served: Served) -> None:
    with served.clients.use(served.endpoint) as worker:
        stream = worker.stream(RECORD, NUMBER, OrchestratorConfig(), None)
        await stream.read()
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_nobody_there_is_unavailable(served: Served) -> None:
    with served.clients.use("127.0.0.1:1") as worker, pytest.raises(UnavailableError):
        await worker.prefill_status(5)
