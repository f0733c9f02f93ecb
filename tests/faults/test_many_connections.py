"""Two thousand connections that do not send, send slowly or do not read do not affect valid streams of the same
gateway, and are closed or refused."""

import asyncio
import json

import pytest

from baton.limits import BODY_S, HEADERS_S, WRITE_S
from gateway.door.bounded_http import allow_connections
from tests.support.clusters.scripted_orchestrator import MODEL
from tests.support.eventually import eventually
from tests.support.wire.hostile.dripping import HEAD, dripping
from tests.support.wire.http_gateway import HOST, Http, scripted_gateway

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(900)]

NUM_CONNECTIONS = 2000
NUM_HONEST = 10
NUM_TOKENS = 64
NUM_DEAF = 10
NUM_PROMPTS = 25
DRIP_S = 5.0
"""Seconds between two bytes of a client that sends slowly: less than each limit on the time without progress."""
IDLE = (b"", HEAD, HEAD + b"content-length: 90\r\n\r\n", HEAD + b"content-length: 90\r\n\r\n{")
"""Beginnings of requests that never go on."""
ENDLESS = json.dumps({"model": MODEL.name, "prompt": ["Hi"] * NUM_PROMPTS, "max_tokens": 4000, "stream": True}).encode()
UNREAD = HEAD + b"content-length: %d\r\n\r\n" % len(ENDLESS) + ENDLESS
"""Request of a stream with more bytes than the buffers of a connection hold."""


async def ended(sent: bytes, http: Http) -> bytes:
    """Everything that a client gets which sends this and no more."""
    reader, writer = await asyncio.open_connection(HOST, http.port)
    writer.write(sent)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def honest(http: Http, is_over: asyncio.Event) -> int:
    """Ask for streams one after the other until the others have ended; return their number."""
    num_streams = 0
    while not is_over.is_set():
        stream = await http.openai.completions.create(
            model=MODEL.name, prompt="Hi", max_tokens=NUM_TOKENS, stream=True, timeout=600
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text.split() == [*map(str, range(NUM_TOKENS)), "tail"]
        num_streams += 1
    return num_streams


async def test_idle_connections_end_and_honest_streams_do_not_notice() -> None:
    allow_connections()
    is_over = asyncio.Event()
    async with scripted_gateway() as (service, http, _client):
        streams = [asyncio.create_task(honest(http, is_over)) for _ in range(NUM_HONEST)]
        idle = [asyncio.create_task(ended(IDLE[number % len(IDLE)], http)) for number in range(NUM_CONNECTIONS)]
        limit_s = 10 * max(HEADERS_S, BODY_S, WRITE_S)
        assert set(await asyncio.wait_for(asyncio.gather(*idle), limit_s)) == {b""}
        is_over.set()
        num_streams = sum(await asyncio.gather(*streams))
        assert len(service.requests) == num_streams  # each was sent once


async def test_slow_senders_and_clients_that_do_not_read_end_and_honest_streams_do_not_notice() -> None:
    allow_connections()
    is_over = asyncio.Event()
    async with scripted_gateway() as (service, http, _client):
        streams = [asyncio.create_task(honest(http, is_over)) for _ in range(NUM_HONEST)]
        slow = [asyncio.create_task(dripping(http.port, 60_000, DRIP_S)) for _ in range(NUM_CONNECTIONS)]
        deaf = [await asyncio.open_connection(HOST, http.port, limit=1) for _ in range(NUM_DEAF)]
        for _, writer in deaf:
            writer.write(UNREAD)
        limit_s = 10 * max(BODY_S, WRITE_S)
        lines = await asyncio.wait_for(asyncio.gather(*slow), limit_s)
        assert {line[:13] for line in lines} <= {b"HTTP/1.1 408 ", b"HTTP/1.1 429 ", b""}
        assert any(line.startswith(b"HTTP/1.1 408 ") for line in lines)

        async def num_open() -> int:
            return len(http.server._server.server_state.connections)

        await eventually(num_open, lambda number: number <= NUM_HONEST, within_s=limit_s)
        is_over.set()
        num_streams = sum(await asyncio.gather(*streams))
        assert len(service.requests) == num_streams + NUM_DEAF * NUM_PROMPTS  # each was sent once
        for _, writer in deaf:
            writer.close()
