import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.errors import ConfigError, InvalidArgumentError, UnavailableError
from baton.limits import MAX_MESSAGE_BYTES
from baton.transport.channel import Keepalive, bind, make_channel, make_server
from baton.transport.status_interceptor import translate_rpc_errors
from tests.support.wire.rpc import STREAM, UNARY, Context, Service, call_unary, connected, served

pytestmark = pytest.mark.integration

NUM_STREAMS = 2000
FRAME_BYTES = 64
"""More than gRPC adds to a message."""


class Crowded(Service):
    """Streams that begin only when all are open."""

    def __init__(self) -> None:
        self._num_open = 0
        self._all_open = asyncio.Event()

    async def stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        self._num_open += 1
        if self._num_open == NUM_STREAMS:
            self._all_open.set()
        await self._all_open.wait()
        for part in request:
            yield bytes((part,))


async def test_thousands_of_streams_at_once_are_all_served() -> None:
    async def one(channel: grpc.aio.Channel, index: int) -> bytes:
        replies = channel.unary_stream(STREAM, bytes, bytes)(index.to_bytes(3))
        return b"".join([reply async for reply in replies])

    async with connected(Crowded()) as channel:
        results = await asyncio.gather(*(one(channel, index) for index in range(NUM_STREAMS)), return_exceptions=True)
    assert [index for index, result in enumerate(results) if result != index.to_bytes(3)] == []


async def test_port_0_takes_a_free_port() -> None:
    async with served(Service()) as port, make_channel(f"127.0.0.1:{port}") as channel:
        assert await call_unary(channel, b"hello") == b"hello"


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_an_ipv6_address_is_served_with_and_without_brackets(host: str) -> None:
    server = make_server()
    assert bind(server, host) > 0
    await server.stop(None)


async def test_port_in_use_is_one_clear_line() -> None:
    async with served(Service()) as port:
        with pytest.raises(ConfigError, match=rf"^cannot listen on 127\.0\.0\.1:{port}: .* choose another[^\n]*$"):
            bind(make_server(), "127.0.0.1", port)


async def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        bind(make_server(), "192.0.2.1", 0)


async def test_message_up_to_the_limit_passes() -> None:
    request = bytes(MAX_MESSAGE_BYTES - FRAME_BYTES)
    async with connected(Service()) as channel:
        assert await call_unary(channel, request) == request


async def test_message_over_the_limit_is_refused_by_the_server() -> None:
    unlimited = (("grpc.max_send_message_length", -1),)
    async with served(Service()) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
        with pytest.raises(InvalidArgumentError), translate_rpc_errors():
            await call_unary(channel, bytes(MAX_MESSAGE_BYTES + 1))


async def test_channel_connects_again_to_a_server_that_came_back() -> None:
    async with served(Service()) as port:
        pass
    async with make_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(UnavailableError), translate_rpc_errors():
            await call_unary(channel)
        async with served(Service(), port=port):
            method = channel.unary_unary(UNARY, bytes, bytes)
            assert await method(b"again", timeout=60, wait_for_ready=True) == b"again"


class Wire:
    """A relay of bytes between a client and a server; when cut, both connections stay open and carry nothing."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._whole = True
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._whole = False

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if self._whole:
                    sink.write(data)
                    await sink.drain()
        except ConnectionError:
            return  # one side hung up; so does the other, below
        finally:
            sink.close()


class Waiting(Service):
    """A call that never ends by itself."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.left = asyncio.Event()

    async def unary(self, request: bytes, context: Context) -> bytes:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return b""


QUICK = Keepalive(interval_s=1.0, timeout_s=0.5)
PATIENT = Keepalive(interval_s=60.0, timeout_s=60.0)


async def entered(service: Waiting, channel: grpc.aio.Channel) -> "asyncio.Task[bytes]":
    """Return a call that the service has entered. On a crowded machine, a slow connection may be given up before."""
    while True:
        call = asyncio.create_task(call_unary(channel))
        entering = asyncio.create_task(service.entered.wait())
        await asyncio.wait({call, entering}, return_when=asyncio.FIRST_COMPLETED)
        entering.cancel()
        if not call.done():
            return call


@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_side_finds_out_that_the_other_is_gone_without_a_word(side: str) -> None:
    service = Waiting()
    async with served(service, keepalive=QUICK if side == "server" else PATIENT) as server_port:
        wire = Wire(server_port)
        keepalive = QUICK if side == "client" else PATIENT
        async with wire.listening() as port, make_channel(f"127.0.0.1:{port}", keepalive) as channel:
            call = await entered(service, channel)
            wire.cut()
            if side == "client":
                with pytest.raises(UnavailableError), translate_rpc_errors():
                    await call
            else:
                await asyncio.wait_for(service.left.wait(), 30)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)


async def test_frequent_pings_are_not_punished() -> None:
    """A server with gRPC's own limits answers such a client with GOAWAY, too many pings."""
    service = Waiting()
    async with (
        served(service, keepalive=PATIENT) as port,
        make_channel(f"127.0.0.1:{port}", Keepalive(interval_s=0.5, timeout_s=60.0)) as channel,
    ):
        call = asyncio.create_task(call_unary(channel))
        done, _ = await asyncio.wait({call}, timeout=5.5)  # gRPC would hang up at the fifth ping
        assert not done
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
