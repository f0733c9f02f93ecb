"""Streams that share a call: each gets its own events and its own end; what breaks the call fails all, and no more."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from baton.errors import (
    BatonError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    VersionMismatchError,
)
from baton.transport.channel import make_channel, make_server
from baton.types import TokenEvent
from baton.v1 import generate_pb2 as pb
from orchestrator.workers.streams import MAX_COMMAND_BYTES, SharedStreams, StreamPart
from tests.support.eventually import eventually
from tests.support.wire.rpc import serving_methods

pytestmark = pytest.mark.integration

Context = grpc.aio.ServicerContext[Any, Any]


class Call:
    """One call, as the group sees it."""

    def __init__(self) -> None:
        self.commands: list[pb.StreamCommand] = []
        self.to_send: asyncio.Queue[pb.StreamEvents | None] = asyncio.Queue()
        self.ended = asyncio.Event()

    def say(self, *events: pb.StreamEvent) -> None:
        self.to_send.put_nowait(pb.StreamEvents(events=events))

    async def opened(self) -> list[int]:
        return [command.open.number for command in self.commands if command.HasField("open")]

    async def left(self) -> list[int]:
        return [command.leave for command in self.commands if command.WhichOneof("command") == "leave"]


class Group:
    """A generation group whose test says what it sends."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def streams(self, commands: AsyncIterator[pb.StreamCommand], context: Context) -> AsyncIterator[Any]:
        call = Call()
        self.calls.append(call)
        obeying = asyncio.create_task(self._obey(commands, call))
        try:
            while (message := await call.to_send.get()) is not None:
                yield message
        finally:
            obeying.cancel()
            await asyncio.gather(obeying, return_exceptions=True)
            call.ended.set()

    async def _obey(self, commands: AsyncIterator[pb.StreamCommand], call: Call) -> None:
        async for command in commands:
            call.commands.append(command)
        call.to_send.put_nowait(None)


class Served:
    """The group, its server, and streams of it."""

    def __init__(self, group: Group, server: grpc.aio.Server, streams: SharedStreams) -> None:
        self.group = group
        self.server = server
        self.streams = streams

    async def open(self, *numbers: int) -> tuple[Call, list[StreamPart]]:
        """Streams of these numbers, on a call that has heard of them."""
        opened = [self.streams.open(pb.StreamRequest(number=number)) for number in numbers]

        async def hearing() -> list[Call]:
            return [call for call in self.group.calls if set(numbers) <= set(await call.opened())]

        (call,) = await eventually(hearing, lambda calls: len(calls) == 1)
        return call, opened


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    group, server = Group(), make_server()
    service = pb.DESCRIPTOR.services_by_name["GenerationGroup"].full_name
    method: Any = grpc.stream_stream_rpc_method_handler(
        group.streams, pb.StreamCommand.FromString, pb.StreamEvents.SerializeToString
    )
    async with (
        serving_methods(service, {"Streams": method}, server) as port,
        make_channel(f"127.0.0.1:{port}") as channel,
    ):
        streams = SharedStreams(channel)
        yield Served(group, server, streams)
        await streams.close()


def token(number: int, index: int) -> pb.StreamEvent:
    return pb.StreamEvent(number=number, event=pb.TokenEvent(index=index))


def end(number: int, error: str = "", text: str = "", retry_after_s: float = 0.0) -> pb.StreamEvent:
    return pb.StreamEvent(number=number, end=pb.StreamEnd(error=error, text=text, retry_after_s=retry_after_s))


async def read(stream: StreamPart) -> list[int]:
    """Indices to the end."""
    indices = []
    while isinstance(event := await stream.read(), TokenEvent):
        indices.append(event.index)
    return indices


async def test_each_stream_gets_its_own(served: Served) -> None:
    call, (one, two) = await served.open(1, 2)
    call.say(token(1, 0), token(2, 0), token(1, 1), end(1))
    call.say(token(2, 1), end(2))
    assert list(await asyncio.gather(read(one), read(two))) == [[0, 1], [0, 1]]
    assert len(served.group.calls) == 1


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"finishes": [99]}, VersionMismatchError),
        ({"finishes": [0, 0], "texts": []}, InvalidArgumentError),
    ],
)
async def test_tokens_that_cannot_be_read_end_their_streams_alone(
    served: Served, columns: dict[str, Any], error: type[BatonError]
) -> None:
    call, (one, two) = await served.open(1, 2)
    good = {"numbers": [1], "choices": [0], "indices": [0], "token_ids": [5], "texts": ["a"], "unix_ns": [7]}
    call.to_send.put_nowait(pb.StreamEvents(tokens=pb.TokenColumns(**{**good, "finishes": [0], **columns})))
    call.say(token(2, 0), end(2))
    with pytest.raises(error):
        await one.read()
    assert await read(two) == [0]
    await eventually(call.left, lambda left: set(left) == {1, 2})


async def test_an_event_that_cannot_be_read_ends_its_stream_alone(served: Served) -> None:
    call, (one, two) = await served.open(1, 2)
    call.say(pb.StreamEvent(number=1, event=pb.TokenEvent(finish=99)), token(2, 0), end(2))  # type: ignore[arg-type]
    with pytest.raises(VersionMismatchError):
        await one.read()
    assert await read(two) == [0]


async def test_a_stream_that_nobody_reads_holds_up_no_other(served: Served) -> None:
    call, (_, two) = await served.open(1, 2)
    for index in range(5000):
        call.say(*(token(1, index) for _ in range(20)), token(2, index))
    call.say(end(2))
    assert await asyncio.wait_for(read(two), 60) == list(range(5000))


async def test_one_stream_s_error_is_its_own(served: Served) -> None:
    call, (one, two, three) = await served.open(1, 2, 3)
    call.say(end(1, "NotFoundError", "not kept here"), end(2, "ResourceExhaustedError", "full", 1.5), token(3, 0))
    with pytest.raises(NotFoundError, match="^not kept here$"):
        await one.read()
    with pytest.raises(ResourceExhaustedError) as caught:
        await two.read()
    assert caught.value.retry_after_s == 1.5
    event = await three.read()
    assert isinstance(event, TokenEvent) and event.index == 0


async def test_an_error_of_a_newer_group_is_an_error(served: Served) -> None:
    call, (one,) = await served.open(1)
    call.say(end(1, "NewerError", "who knows"))
    with pytest.raises(BatonError, match="who knows"):
        await one.read()


async def test_what_came_before_the_end_is_read_before_it(served: Served) -> None:
    call, (one,) = await served.open(1)
    call.say(token(1, 0), end(1, "NotFoundError", "gone"))
    event = await one.read()
    assert isinstance(event, TokenEvent) and event.index == 0
    with pytest.raises(NotFoundError):
        await one.read()


def large_request(number: int, num_bytes: int) -> pb.StreamRequest:
    """A request whose command takes that many bytes."""
    request = pb.StreamRequest(request_id="r", number=number, store=pb.BlockNaming(salt="x" * (num_bytes - 64)))
    request.store.salt += "x" * (num_bytes - pb.StreamCommand(open=request).ByteSize())
    assert pb.StreamCommand(open=request).ByteSize() == num_bytes
    return request


async def test_a_broken_call_fails_all_its_streams_and_the_next_one_opens_another(served: Served) -> None:
    call, (one, two) = await served.open(1, 2)
    call.say(token(1, 0))
    event = await one.read()
    assert event is not None
    call.to_send.put_nowait(None)  # the group ends the call, and the streams had not ended
    errors = await asyncio.gather(one.read(), two.read(), return_exceptions=True)
    assert all(isinstance(error, UnavailableError) for error in errors) and errors[0] is not errors[1]
    again, (three,) = await served.open(3)
    again.say(token(3, 0), end(3))
    assert await read(three) == [0] and again is not call


async def test_a_group_that_dies_fails_all(served: Served) -> None:
    _, opened = await served.open(1, 2)
    reading = [asyncio.create_task(stream.read()) for stream in opened]
    await served.server.stop(0)
    errors = await asyncio.gather(*reading, return_exceptions=True)
    assert [isinstance(error, BatonError) for error in errors] == [True, True]


async def test_the_group_hears_who_leaves_and_who_has_the_end(served: Served) -> None:
    call, (one, two) = await served.open(1, 2)
    one.cancel()
    one.cancel()
    assert await eventually(call.left, lambda left: len(left) > 0) == [1]
    call.say(token(1, 0), token(2, 0), end(2))  # what was under way to the one that left is nobody's
    assert await read(two) == [0]
    await asyncio.wait_for(call.ended.wait(), 60)
    assert await call.left() == [1, 2]


async def test_the_call_ends_with_its_last_stream(served: Served) -> None:
    call, (one,) = await served.open(1)
    call.say(end(1))
    assert await one.read() is None
    await asyncio.wait_for(call.ended.wait(), 60)
    one.cancel()
    assert await call.left() == [1]


async def test_a_call_that_cannot_be_made_is_an_error_of_the_read_and_the_next_makes_its_own(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no such channel")

    with monkeypatch.context() as patched:
        patched.setattr(served.streams, "_stub", SimpleNamespace(Streams=fail))
        with pytest.raises(UnavailableError, match="no such channel"):
            await asyncio.wait_for(served.streams.open(pb.StreamRequest(number=1)).read(), 60)
    call, (two,) = await served.open(2)
    call.say(end(2))
    assert await two.read() is None


async def test_a_request_that_fits_into_no_message_fails_alone(served: Served) -> None:
    call, (one,) = await served.open(1)
    refused = served.streams.open(large_request(2, MAX_COMMAND_BYTES + 1))
    with pytest.raises(InvalidArgumentError, match=f"request r takes {MAX_COMMAND_BYTES + 1} bytes"):
        await refused.read()
    refused.cancel()
    again, (three,) = await served.open(3)
    call.say(token(1, 0), end(1), end(3))
    assert again is call and await call.opened() == [1, 3] and not await call.left()
    assert (await read(one), await read(three)) == ([0], [])


async def test_the_largest_request_reaches_the_group(served: Served) -> None:
    opened = served.streams.open(large_request(1, MAX_COMMAND_BYTES))
    call, _ = await served.open(2)
    assert await call.opened() == [1, 2]
    call.say(end(1), end(2))
    assert await read(opened) == []


async def test_nobody_there_is_an_error_of_the_read() -> None:
    async with make_channel("127.0.0.1:1") as channel:
        streams = SharedStreams(channel)
        with pytest.raises(UnavailableError):
            await streams.open(pb.StreamRequest(number=1)).read()
        await streams.close()
