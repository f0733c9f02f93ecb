"""Headers that say who calls: those that gRPC does not take are refused by the gateway, always with the same status."""

from typing import Any

import httpx2
import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_CALLER_BYTES
from baton.rpc_status import translate_rpc_errors
from baton.transport.channel import make_channel
from baton.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from gateway.door.rules import HttpRules
from tests.support.clusters.scripted_orchestrator import MODEL, ScriptedOrchestrator, serving
from tests.support.wire.http_gateway import scripted_gateway

pytestmark = pytest.mark.integration

NUM_TRIES = 4
"""gRPC refuses metadata between its two limits at random."""
BODY: dict[str, Any] = {"model": MODEL.name, "prompt": "Hi", "max_tokens": 1}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
KEY = "authorization"


def bearer(num_bytes: int) -> str:
    return "Bearer ".ljust(num_bytes, "k")


async def statuses(client: httpx2.AsyncClient, headers: dict[str, Any]) -> list[int]:
    """Statuses of the routes that ask the server, and of one that does not."""
    answers = [
        await client.get("/v1/models", headers=headers),
        await client.post("/v1/completions", json=BODY, headers=headers),
        await client.post("/tokenize", json={"prompt": "Hi"}, headers=headers),
        await client.get("/console/api/state", headers=headers),
        await client.get("/v1/responses/absent", headers=headers),
    ]
    for answer in answers:
        assert answer.is_success or answer.json()["error"]["message"]
    return [answer.status_code for answer in answers]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({KEY: "Bearer schl\u00fcssel".encode()}, 401),
        ({KEY: "Bearer a\tb"}, 401),
        ({"baton-tenant": "\u00fc".encode()}, 400),
        ({KEY: bearer(MAX_CALLER_BYTES + 1)}, 431),
        ({KEY: bearer(MAX_CALLER_BYTES), "baton-tenant": "a"}, 431),
        ({KEY: bearer(8192)}, 431),
        ({KEY: bearer(12_000)}, 431),
        ({KEY: bearer(17_000)}, 431),
        ({KEY: bearer(40_000)}, 431),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_caller_that_grpc_does_not_take_is_refused_always(headers: dict[str, Any], status: int) -> None:
    async with scripted_gateway(rules=HttpRules(trust_tenant=True)) as (service, _http, client):
        for _ in range(NUM_TRIES):
            assert set(await statuses(client, headers)) == {status}
        assert not service.requests and not service.looks


@pytest.mark.parametrize(
    "headers",
    [
        {KEY: bearer(MAX_CALLER_BYTES), "traceparent": TRACE, "tracestate": "a=".ljust(512, "b")},
        {KEY: bearer(MAX_CALLER_BYTES), "traceparent": TRACE, "tracestate": "a=".ljust(9000, "b")},
        {"traceparent": "\u00fc".encode()},
        {"baton-tenant": "\u00fc".encode()},
    ],
    ids=["largest", "trace too long", "trace of other characters", "tenant that is not trusted"],
)
async def test_every_other_caller_is_served(headers: dict[str, Any]) -> None:
    async with scripted_gateway() as (service, _http, client):
        for _ in range(NUM_TRIES):
            assert await statuses(client, headers) == [200, 200, 200, 200, 404]
        assert all(metadata.get(KEY) == headers.get(KEY) for metadata in service.metadata)


async def test_grpcs_own_refusal_of_metadata_is_no_full_queue() -> None:
    async with serving(ScriptedOrchestrator()) as target, make_channel(target) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorStub(channel)
        with pytest.raises(InvalidArgumentError, match="metadata size"), translate_rpc_errors():
            await stub.GetModel(orchestrator_pb2.GetModelRequest(), metadata=((KEY, bearer(20_000)),))
