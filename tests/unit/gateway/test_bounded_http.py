"""A connection has bounds on headers and on time without progress, and there are so many at most; others are served."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest

from baton.limits import MAX_HEADER_BYTES
from gateway.door import bounded_http
from gateway.door.rules import DEFAULT_RULES, HttpRules
from tests.support.clusters.scripted_orchestrator import MODEL, Fault
from tests.support.kernels.os_memory import peak_bytes, reset_peak
from tests.support.wire.http_gateway import HOST, Http, scripted_gateway

pytestmark = pytest.mark.integration

WITHIN_S = 60.0
MOST_BYTES = 16 * 2**20
BODY = json.dumps({"model": MODEL.name, "prompt": "Hi", "max_tokens": 3}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@asynccontextmanager
async def connection(http: Http) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, http.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def is_served(client: httpx2.AsyncClient) -> bool:
    return (await client.post("/v1/completions", content=BODY, headers={"content-type": "application/json"})).is_success


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Everything the server sent before it closed the connection."""
    try:
        return await asyncio.wait_for(reader.read(), WITHIN_S)
    except ConnectionResetError:
        return b""


async def test_headers_of_many_bytes_are_refused_whatever_their_shape() -> None:
    many = b"".join(b"x-%d: y\r\n" % number for number in range(20_000))
    long = b"authorization: Bearer " + b"k" * (MAX_HEADER_BYTES + 1) + b"\r\n"
    path = b"GET /" + b"a" * 2 * MAX_HEADER_BYTES + b" HTTP/1.1\r\n"
    async with scripted_gateway() as (service, http, client):
        for head in (HEAD + many, HEAD + long, HEAD + b"x: " + b"y" * 10**6, path, path + b"\r\n"):
            async with connection(http) as (reader, writer):
                writer.write(head)
                answer = await ended(reader)
                # what the server has not read when it closes the connection resets it, before the answer is read
                assert answer.startswith(b"HTTP/1.1 431 ") or (not answer and len(head) > 2**16), answer[:80]
                assert not answer or b"the headers have more than 16384 bytes" in answer
        assert not service.requests
        assert await is_served(client)


async def test_headers_below_the_limit_are_taken_in_however_many_pieces_they_come() -> None:
    key = b"x-long: " + b"k" * (MAX_HEADER_BYTES - 1000) + b"\r\n"
    request = HEAD + key + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
    async with scripted_gateway() as (_, http, _client):
        for size in (1000, len(request)):
            async with connection(http) as (reader, writer):
                for start in range(0, len(request), size):
                    writer.write(request[start : start + size])
                    await writer.drain()
                assert (await ended(reader)).startswith(b"HTTP/1.1 200 ")


async def test_headers_without_end_take_no_memory() -> None:
    async with scripted_gateway() as (_, http, client):
        async with connection(http) as (reader, writer):
            answer = asyncio.create_task(ended(reader))
            sent = 0
            reset_peak()
            before = peak_bytes()
            while not answer.done() and sent < 64 * 2**20:
                writer.write(b"x: y\r\n" * 1000 if sent else HEAD)
                sent += 6000
                try:
                    await writer.drain()
                except ConnectionError:
                    break
            await answer
        assert sent < 64 * 2**20, "all of it was taken"
        assert peak_bytes() - before < MOST_BYTES
        assert await is_served(client)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("HEADERS_S", b""),
        ("HEADERS_S", HEAD),
        ("BODY_S", HEAD + b"content-length: 90\r\n\r\n"),
        ("BODY_S", HEAD + b"content-length: 90\r\n\r\n" + BODY[:20]),
    ],
)
async def test_who_sends_nothing_more_is_cut_off(
    name: str, sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_gateway() as (service, http, client):
        with monkeypatch.context() as short:
            short.setattr(bounded_http, name, 0.2)
            async with connection(http) as (reader, writer):
                writer.write(sent)
                assert await ended(reader) == b""
        assert not service.requests
        assert await is_served(client)
    assert not [record for record in caplog.records if record.exc_info]


async def test_who_takes_nothing_of_a_stream_is_cut_off_and_its_request_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_http, "WRITE_S", 0.2)
    async with scripted_gateway() as (service, http, client):
        body = json.dumps({"model": MODEL.name, "prompt": ["Hi"] * 25, "max_tokens": 4000, "stream": True}).encode()
        async with connection(http) as (_, writer):
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            await asyncio.wait_for(service.cancelled.wait(), WITHIN_S)
        assert await is_served(client)


async def test_more_connections_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "MAX_CONNECTIONS", 2)
    async with (
        scripted_gateway() as (_, http, _client),
        connection(http),
        connection(http),
        connection(http) as (reader, _writer),
    ):
        answer = await ended(reader)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"2 connections are open" in answer


async def test_more_connections_of_an_address_than_configured_are_refused() -> None:
    rules = HttpRules(max_connections_per_address=2)
    async with (
        scripted_gateway(rules=rules) as (_, http, _client),
        connection(http),
        connection(http),
        connection(http) as (reader, _writer),
    ):
        answer = await ended(reader)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"2 connections from this address are open" in answer
        other, writer = await asyncio.open_connection(HOST, http.port, local_addr=("127.0.0.2", 0))
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert (await ended(other)).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/9.9.9\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"no colon\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
async def test_data_that_is_no_request_is_refused_in_openais_shape(sent: bytes) -> None:
    async with scripted_gateway() as (_, http, client):
        async with connection(http) as (reader, writer):
            writer.write(sent)
            head, _, answer = (await ended(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head and b"connection: close" in head
        assert json.loads(answer)["error"]["type"] == "invalid_request_error"
        assert await is_served(client)


@pytest.mark.parametrize("next_request", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"])
async def test_nothing_is_written_into_an_answer_that_has_begun(next_request: bytes) -> None:
    async with scripted_gateway(Fault(after=1, hang=True)) as (service, http, client):
        body = json.dumps({"model": MODEL.name, "prompt": "Hi", "max_tokens": 3, "stream": True}).encode()
        async with connection(http) as (reader, writer):
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            await reader.readuntil(b"data: ")
            writer.write(next_request + b"nonsense\r\n\r\n")
            assert b"HTTP/1.1" not in await ended(reader)
        await asyncio.wait_for(service.cancelled.wait(), WITHIN_S)
        assert await is_served(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_of_http_1_0_get_an_answer_without_chunks(stream: bool) -> None:
    body = json.dumps({"model": MODEL.name, "prompt": "Hi", "max_tokens": 3, "stream": stream}).encode()
    old = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
    async with scripted_gateway() as (_, http, _client), connection(http) as (reader, writer):
        writer.write(old + b"connection: keep-alive\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        head, _, answer = (await ended(reader)).partition(b"\r\n\r\n")
    assert b"chunked" not in head and b"connection: close" in head
    if stream:
        events = answer.decode().strip().split("\n\n")
        assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    else:
        assert len(json.loads(answer)["choices"]) == 1


async def test_a_connection_without_a_request_is_closed_after_the_configured_time() -> None:
    rules = HttpRules(keep_alive_s=0.2)
    async with scripted_gateway(rules=rules) as (_, http, _client), connection(http) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await ended(reader)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("sent", "more"),
    [
        (b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\n", b"abc"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\r\n"),
    ],
    ids=["rest of a body", "empty line"],
)
async def test_data_that_is_no_request_does_not_keep_a_connection_open(sent: bytes, more: bytes) -> None:
    rules = HttpRules(keep_alive_s=0.5)
    async with scripted_gateway(rules=rules) as (_, http, _client), connection(http) as (reader, writer):
        writer.write(sent)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(more)
        await ended(reader)


async def test_half_a_head_during_an_answer_does_not_keep_a_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEADERS_S", 0.5)
    body = json.dumps({"model": MODEL.name, "prompt": "Hi", "max_tokens": 3, "stream": True}).encode()
    async with scripted_gateway() as (_, http, _client), connection(http) as (reader, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body + HEAD)
        assert b"[DONE]" in await ended(reader)


async def test_a_request_that_follows_the_rest_of_a_body_is_answered_after_the_keep_alive_time() -> None:
    rules, hang = HttpRules(keep_alive_s=0.2), Fault(after=1, hang=True)
    body = json.dumps({"model": MODEL.name, "prompt": "Hi", "max_tokens": 3, "stream": True}).encode()
    async with scripted_gateway(hang, rules=rules) as (_, http, _client), connection(http) as (reader, writer):
        writer.write(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nab")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"c" + HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"data: ")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readuntil(b"[DONE]"), 1.0)
        assert not reader.at_eof()


@pytest.mark.parametrize("rules", [DEFAULT_RULES, HttpRules(keep_alive_s=600.0)])
async def test_a_connection_without_a_request_outlasts_those_of_load_balancers(rules: HttpRules) -> None:
    """Load balancers keep idle connections for 60 s, and answer 502 now and then where the server closes first."""
    async with scripted_gateway(rules=rules) as (_, http, _client), connection(http) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        (protocol,) = http.server._server.server_state.connections
        assert isinstance(protocol, bounded_http.BoundedProtocol)
        assert protocol.timeout_keep_alive == rules.keep_alive_s > 60
