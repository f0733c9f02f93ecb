"""Bodies that come slowly, or that are long, take nothing from other clients: neither their bytes nor their memory."""

import asyncio
import json
import operator
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.door import bounded_http, held_bodies
from tests.support.clusters.scripted_orchestrator import MODEL, Fault, ScriptedOrchestrator
from tests.support.eventually import eventually
from tests.support.kernels.os_memory import process_bytes
from tests.support.models.tiny_tokenizer import chat_letters
from tests.support.wire.hostile.dripping import HEAD, dripping
from tests.support.wire.http_gateway import HOST, scripted_gateway

pytestmark = pytest.mark.integration

WITHIN_S = 60.0
BODY: dict[str, Any] = {"model": MODEL.name, "prompt": "Hi", "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/console/api/completion": BODY,
}
NUM_SLOW = 20
NUM_FIT = 4
"""Number of slow bodies for which an address has room."""
DRIP_S = 0.02
PADDING = 12 * 2**20
NUM_PADDED = 8
ID = "i" * 9000
"""Id of an item. It is kept with the conversation, but does not belong to the prompt."""


async def until(number: int, tasks: set[asyncio.Task[bytes]]) -> list[bytes]:
    """Wait until so many of the slow bodies are answered; return the answers."""
    async with asyncio.timeout(WITHIN_S):
        while len(done := [each for each in tasks if each.done()]) < number:
            await asyncio.wait(tasks - set(done), return_when=asyncio.FIRST_COMPLETED)
    return [each.result() for each in done]


@contextmanager
def limits(patch: pytest.MonkeyPatch, num_bytes: int) -> Iterator[None]:
    """Let all bodies have so many bytes, and those of an address a quarter."""
    with patch.context() as patched:
        patched.setattr(held_bodies, "MAX_BODIES_BYTES", num_bytes)
        patched.setattr(held_bodies, "MAX_ADDRESS_BODIES_BYTES", num_bytes // 4)
        yield


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"], ids=["own address", "another address"])
async def test_slow_senders_do_not_shut_others_out(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with limits(monkeypatch, 4 * (NUM_FIT * 1000 + 900)):
        async with scripted_gateway() as (service, http, client):
            slow = {asyncio.create_task(dripping(http.port, 1000, DRIP_S, address)) for _ in range(NUM_SLOW)}
            refused = await until(NUM_SLOW - NUM_FIT, slow)
            assert all(line.startswith(b"HTTP/1.1 429 ") for line in refused)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            assert len(service.requests) == 1
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)


async def test_the_limit_on_all_bodies_holds_for_senders_with_several_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with limits(monkeypatch, 4 * (NUM_FIT * 100_000 + 90_000)):
        async with scripted_gateway() as (_, http, client):
            addresses = [f"127.0.0.{number}" for number in range(2, 7)]
            slow = {
                asyncio.create_task(dripping(http.port, 100_000, DRIP_S, address))
                for address in addresses
                for _ in range(NUM_FIT)
            }
            refused = await until(1, slow)
            assert all(line.startswith(b"HTTP/1.1 429 ") for line in refused)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            assert len([each for each in slow if not each.done()]) >= len(slow) - 2
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)


async def test_a_body_without_bytes_is_not_refused_in_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.dumps(BODY).encode()
    with limits(monkeypatch, 4 * 1500):
        async with scripted_gateway() as (_, http, _client):
            reader, writer = await asyncio.open_connection(HOST, http.port)
            writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(content))
            await reader.readuntil(b"100 Continue\r\n\r\n")  # its body is waited for
            slow = {asyncio.create_task(dripping(http.port, 1000, DRIP_S)) for _ in range(2)}
            assert (await until(1, slow))[0].startswith(b"HTTP/1.1 429 ")
            writer.write(content)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)


async def test_a_body_that_is_too_slow_in_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_gateway() as (_, http, client):
        with monkeypatch.context() as patched:
            patched.setattr(held_bodies, "BODY_S", 0.3)
            patched.setattr(held_bodies, "BODY_BYTES_PER_S", 10 / DRIP_S)  # ten times what it sends
            slow = {asyncio.create_task(dripping(http.port, 1, DRIP_S))}
            assert (await until(1, slow))[0].startswith(b"HTTP/1.1 408 ")
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_the_rest_of_a_body_that_was_answered_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scripted_gateway() as (_, http, _client):
        monkeypatch.setattr(bounded_http, "BODY_S", 0.3)
        reader, writer = await asyncio.open_connection(HOST, http.port)
        writer.write(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")

        async def drip() -> None:
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(DRIP_S)

        dripped = asyncio.create_task(drip())
        answer = await reader.readuntil(b"\r\n")
        with pytest.raises(ConnectionError):  # it is reset, because bytes arrive after its end
            await asyncio.wait_for(dripped, WITHIN_S)
        assert answer.startswith(b"HTTP/1.1 404 ")
        dripped.cancel()
        await asyncio.gather(dripped, return_exceptions=True)
        writer.close()


@asynccontextmanager
async def running(
    client: httpx2.AsyncClient, service: ScriptedOrchestrator, path: str, body: dict[str, Any], number: int
) -> AsyncIterator[None]:
    """Requests whose answers hang, each after the server got it."""
    content, num_before = json.dumps(body).encode(), len(service.requests)

    async def num_asked() -> int:
        return len(service.requests) - num_before

    async with AsyncExitStack() as stack:
        for index in range(number):
            asking = asyncio.create_task(
                client.post(path, content=content, headers={"content-type": "application/json"}, timeout=WITHIN_S)
            )
            stack.push_async_callback(asyncio.wait, (asking,))
            stack.callback(asking.cancel)
            await eventually(num_asked, partial(operator.lt, index))
        yield


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/console/api/completion"]
)
async def test_a_long_answer_to_a_padded_body_holds_none_of_its_bytes(
    path: str, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = BODIES[path] | {"stream": stream, "padding": "u" * 20_000}
    hangs = [Fault(after=1, hang=True)] * NUM_PADDED
    with limits(monkeypatch, 4 * 40_000):
        async with (
            scripted_gateway(*hangs, tokenizer=chat_letters(tmp_path)) as (service, _http, client),
            running(client, service, path, body, NUM_PADDED),
        ):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_that_an_item_does_not_have_are_not_held(stream: bool, tmp_path: Path) -> None:
    hangs = [Fault(after=0, hang=True)] * (NUM_PADDED + 1)
    item = {"role": "user", "content": "Hi", "arguments": "x" * PADDING}
    async with (
        scripted_gateway(*hangs, tokenizer=chat_letters(tmp_path)) as (service, _http, client),
        running(client, service, "/v1/responses", {"input": [item], "stream": stream}, 1),
    ):
        before = process_bytes()
        async with running(client, service, "/v1/responses", {"input": [item], "stream": stream}, NUM_PADDED):
            assert process_bytes() - before < PADDING * NUM_PADDED / 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "held", [{"input": "Hi", "metadata": {"a": "x" * 9000}}, {"input": [{"role": "user", "content": "Hi", "id": ID}]}]
)
async def test_what_running_responses_hold_is_bounded_until_they_end(
    held: dict[str, Any], stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = held | {"stream": stream}
    async with scripted_gateway(Fault(after=1, hang=True), tokenizer=chat_letters(tmp_path)) as (service, _, client):
        async with running(client, service, "/v1/responses", body, 1):
            with limits(monkeypatch, 4 * 15_000):
                refused = await client.post("/v1/responses", json=body)
                assert refused.status_code == 429 and "running requests" in refused.json()["error"]["message"]
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200

        async def status() -> int:
            return (await client.post("/v1/responses", json=body)).status_code

        with limits(monkeypatch, 4 * 15_000):
            await eventually(status, partial(operator.eq, 200))  # the server notices the end
            assert await status() == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_long_answer_to_a_padded_body_holds_no_memory(path: str, stream: bool, tmp_path: Path) -> None:
    body = BODIES[path] | {"stream": stream, "padding": "u" * PADDING}
    hangs = [Fault(after=0, hang=True)] * (NUM_PADDED + 1)
    async with (
        scripted_gateway(*hangs, tokenizer=chat_letters(tmp_path)) as (service, _http, client),
        running(client, service, path, body, 1),
    ):
        before = process_bytes()
        async with running(client, service, path, body, NUM_PADDED):
            assert process_bytes() - before < PADDING * NUM_PADDED / 2
