"""Two thousand connections that neither send nor read data do not affect valid streams of the same gateway, and are
closed."""

import asyncio

import pytest

from baton.limits import BODY_S, HEADERS_S, WRITE_S
from gateway.door.bounded_http import allow_connections
from tests.support.clusters.scripted_orchestrator import MODEL
from tests.support.wire.http_gateway import HOST, Http, scripted_gateway

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(900)]

NUM_CONNECTIONS = 2000
NUM_HONEST = 10
NUM_TOKENS = 64
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
IDLE = (b"", HEAD, HEAD + b"content-length: 90\r\n\r\n", HEAD + b"content-length: 90\r\n\r\n{")
"""Beginnings of requests that never go on."""


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
