"""How a gateway ends: new requests are refused at once, and running ones when their grace has passed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.clusters.scripted_orchestrator import MODEL, Fault, ScriptedOrchestrator, serving
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import chat_letters
from tests.support.wire.http_gateway import http_gateway, scripted_gateway

pytestmark = pytest.mark.integration

BODY: dict[str, Any] = {"model": MODEL.name, "prompt": "Hi", "max_tokens": 3}
RESPONSE: dict[str, Any] = {"model": MODEL.name, "input": "Hi", "max_output_tokens": 3}
HANGS = Fault(after=1, hang=True)


async def asked(service: ScriptedOrchestrator, number: int) -> None:
    async def num_asked() -> int:
        return len(service.requests)

    await eventually(num_asked, lambda found: found == number)


async def refused(client: httpx2.AsyncClient) -> httpx2.Response:
    """The answer to a new request, once new requests are refused."""

    async def ask() -> httpx2.Response:
        return await client.get("/v1/models")

    return await eventually(ask, lambda answer: answer.status_code == 503)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", BODY), ("/v1/responses", RESPONSE), ("/console/api/completion", BODY)],
    ids=["completion", "response", "console"],
)
async def test_what_outlives_the_grace_ends_with_an_error_that_says_to_come_again(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    service = ScriptedOrchestrator((HANGS, HANGS))
    async with (
        serving(service) as target,
        http_gateway(target, chat_letters(tmp_path)) as http,
        httpx2.AsyncClient(base_url=http.url) as client,
    ):
        stream = asyncio.create_task(client.post(path, json=body | {"stream": True}, timeout=60))
        await asked(service, 1)
        whole = asyncio.create_task(client.post("/v1/completions", json=BODY, timeout=60))
        await asked(service, 2)
        ending = asyncio.create_task(http.server.stop(600))
        answer = await refused(client)
        assert answer.json()["error"]["type"] == "service_unavailable_error"
        assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [200, 503]
        assert not (stream.done() or whole.done() or ending.done())
        await http.server.stop()
        await ending
        assert (await whole).status_code == 503
        assert (await whole).json()["error"]["type"] == "service_unavailable_error"
        assert (await stream).status_code == 200
        last = json.loads((await stream).text.strip().split("data: ")[-1])
        assert "the HTTP gateway is ending" in json.dumps(last)


async def test_what_ends_within_the_grace_is_answered() -> None:
    async with scripted_gateway(Fault(after=1, hang=True)) as (service, http, client):
        hanging = asyncio.create_task(client.post("/v1/completions", json=BODY, timeout=60))
        await asked(service, 1)
        running = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": True}, timeout=60))
        await asked(service, 2)
        ending = asyncio.create_task(http.server.stop(600))
        assert (await running).text.endswith("data: [DONE]\n\n")
        hanging.cancel()  # the last client that is waited for
        await ending
        await asyncio.gather(hanging, return_exceptions=True)
