"""Server-sent events of a chunked answer come one by one, however they are cut into chunks."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from benchmarks.support.event_stream import EventStream

pytestmark = pytest.mark.integration

OK = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def answers_of(head: str, chunks: Sequence[bytes]) -> tuple[list[dict[str, object]], bytes]:
    """Post to a server that answers with these bytes; return the events, and what the server received."""
    received = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        request = await reader.readuntil(b"\r\n\r\n")
        length = int(request.lower().partition(b"content-length: ")[2].split()[0])
        received = await reader.readexactly(length)
        writer.write(head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with EventStream.connected("127.0.0.1", port) as stream:
            return [event async for event in stream.post("/path", {"prompt": [1, 2]})], received


async def test_events_come_in_order_to_the_end() -> None:
    events, received = await answers_of(OK, [b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\ndata: [DONE]\n\n', b""])
    assert events == [{"a": 1}, {"a": 2}]
    assert json.loads(received) == {"prompt": [1, 2]}


async def test_an_event_may_be_cut_in_two() -> None:
    events, _ = await answers_of(OK, [b'data: {"a"', b": 1}\n\ndata: [DO", b"NE]\n\n"])
    assert events == [{"a": 1}]


@pytest.mark.parametrize("chunks", [[b'data: {"a": 1}\n\n'], [b'data: {"a": 1}\n\n', b""]])
async def test_a_stream_that_ends_early_is_an_error(chunks: list[bytes]) -> None:
    with pytest.raises(RuntimeError, match=r"ended without \[DONE\]"):
        await answers_of(OK, chunks)


async def test_a_refusal_is_an_error_with_its_text() -> None:
    with pytest.raises(RuntimeError, match=r"400 Bad Request.*too long"):
        await answers_of("HTTP/1.1 400 Bad Request\r\nContent-Length: 8\r\n\r\ntoo long", [])
