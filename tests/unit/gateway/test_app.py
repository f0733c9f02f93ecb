"""What the gateway answers besides tokens: errors with their statuses, keys, cancellations, and what operators ask."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import (
    BatonError,
    ConfigError,
    DeadlineExceededError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from baton.limits import MAX_BODY_BYTES, MAX_REQUEST_ID_CHARS
from baton.proto_types import model_from_proto
from gateway.app import Gateway
from gateway.door.rules import HttpRules
from gateway.listening import open_socket
from gateway.reading import Reader
from gateway.server import Certificate, HttpServer
from gateway.streaming import FAULT
from gateway.upstream import Upstream
from tests.support.clusters.scripted_orchestrator import MODEL, Fault, ScriptedOrchestrator, serving, text_of
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import ids_of, letter_tokenizer
from tests.support.wire.http_gateway import http_gateway, scripted_gateway

pytestmark = pytest.mark.integration

OF_ROUTE = ("baton_http_requests_total", ("route", "/v1/completions"))
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PAGE = "https://chat.example.com"
BODY: dict[str, Any] = {"model": MODEL.name, "prompt": "Hi", "max_tokens": 3}


def before(error: BatonError) -> Fault:
    return Fault(error=error, before_started=True)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (UnauthenticatedError("no such key"), openai.AuthenticationError, 401),
        (PermissionDeniedError("not this"), openai.PermissionDeniedError, 403),
        (DeadlineExceededError("too late"), openai.APIStatusError, 408),
        (BatonError("a bug"), openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_has_its_status(
    error: BatonError, kind: type[openai.APIStatusError], status: int, stream: bool
) -> None:
    async with scripted_gateway(before(error)) as (_, http, _client):
        with pytest.raises(kind, match=str(error)) as refused:
            await http.openai.completions.create(model=MODEL.name, prompt="Hi", stream=stream)
        assert refused.value.status_code == status


async def test_a_full_server_says_when_there_may_be_room() -> None:
    refusals = [before(ResourceExhaustedError("the queue is full", 2.2)) for _ in range(100)]
    async with scripted_gateway(*refusals) as (_, http, _client):
        with pytest.raises(openai.RateLimitError) as refused:
            await http.openai.completions.create(model=MODEL.name, prompt="Hi")
        assert refused.value.response.headers["retry-after"] == "3"
        assert refused.value.code == "rate_limit_exceeded"


async def test_an_error_after_the_first_token_ends_the_stream_and_is_said_in_it() -> None:
    async with scripted_gateway(Fault(after=2, error=BatonError("a bug"))) as (_, _http, client):
        answer = await client.post("/v1/completions", json=BODY | {"stream": True})
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert [json.loads(line)["choices"][0]["text"] for line in lines[:-1]] == ["0 ", "1 "]
        assert json.loads(lines[-1])["error"]["message"] == "a bug"


@pytest.mark.parametrize(
    ("path", "patched"),
    [
        ("/v1/completions", "gateway.answers.Completions.lines"),
        ("/console/api/completion", "gateway.console.routes.token"),
    ],
)
async def test_a_fault_of_this_process_ends_a_stream_with_an_error_event(
    path: str, patched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async with scripted_gateway() as (_, _http, client):
        monkeypatch.setattr(patched, fail)
        answer = await client.post(path, json=BODY | {"stream": True})
    assert answer.status_code == 200
    last = json.loads(answer.text.strip().split("\n")[-1].removeprefix("data: "))
    assert last["error"]["message"] == FAULT


async def test_after_a_fault_which_is_a_500_in_openais_shape_the_connection_serves_the_next_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async with scripted_gateway() as (_, _http, client):
        with monkeypatch.context() as broken:
            broken.setattr("gateway.answers.Completions.whole", fail)
            answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "a bug" not in answer.text
        assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]
        after = await client.post("/v1/completions", json=BODY)
        assert after.status_code == 200
        first, second = (each.extensions["network_stream"].get_extra_info("client_addr") for each in (answer, after))
        assert first == second, "it was not the same connection"


async def test_streams_end_as_clients_expect() -> None:
    async with scripted_gateway() as (_, _http, client):
        answer = await client.post("/v1/completions", json=BODY | {"stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        whole = await client.post("/v1/completions", json=BODY)
        assert whole.json()["choices"][0]["text"] == text_of(3)


async def test_a_stream_whose_server_went_away_goes_on_where_it_was() -> None:
    async with scripted_gateway(Fault(after=2, end=True)) as (service, http, _client):
        stream = await http.openai.completions.create(model=MODEL.name, prompt="Hi", max_tokens=5, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == text_of(5)
        assert len(service.requests) == 2


async def test_the_first_error_of_several_prompts_is_their_answers() -> None:
    async with scripted_gateway(Fault(after=0, hang=True), before(PermissionDeniedError("not this"))) as (
        service,
        _http,
        client,
    ):
        answer = await client.post("/v1/completions", json=BODY | {"prompt": ["Hi", "there"]})
        assert answer.status_code == 403
        assert await asyncio.wait_for(service.cancelled.wait(), 60)


async def test_a_certificate_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    absent = Certificate(tmp_path / "chain.pem", tmp_path / "key.pem")
    async with serving(ScriptedOrchestrator()) as target, Upstream(target) as upstream:
        reader = Reader(letter_tokenizer(), model_from_proto(MODEL))
        with pytest.raises(ConfigError, match="certificate cannot be read"):
            await HttpServer.start(Gateway(upstream, reader), open_socket("127.0.0.1", 0), certificate=absent)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_cancels_its_request(stream: bool) -> None:
    async with scripted_gateway(Fault(after=0, hang=True)) as (service, _http, client):
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": stream}))
        await service.hanging.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await asyncio.wait_for(service.cancelled.wait(), 60)

        async def num_gone() -> float:
            return (await metrics(client)).get((*OF_ROUTE, ("status", "499")), 0)

        await eventually(num_gone, lambda number: number == 1)


async def test_a_server_that_is_away_is_unavailable() -> None:
    async with AsyncExitStack() as behind:
        target = await behind.enter_async_context(serving(ScriptedOrchestrator()))
        async with http_gateway(target, letter_tokenizer()) as http, httpx2.AsyncClient(base_url=http.url) as client:
            await behind.aclose()
            answer = await client.get("/v1/models")
            assert answer.status_code == 503 and answer.json()["error"]["type"] == "service_unavailable_error"
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200


async def metrics(client: httpx2.AsyncClient) -> dict[tuple[Any, ...], float]:
    """Samples, by name and labels."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return {(each.name, *sorted(each.labels.items())): each.value for one in families for each in one.samples}


@pytest.mark.parametrize(("rules", "deadline_ms"), [(HttpRules(), 3_600_000), (HttpRules(default_deadline_s=0), 0)])
async def test_a_request_has_the_configured_deadline(rules: HttpRules, deadline_ms: int) -> None:
    async with scripted_gateway(rules=rules) as (service, _http, client):
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert deadline_ms - 60_000 < service.requests[0].deadline_ms <= deadline_ms


async def test_a_request_whose_deadline_passes_is_ended() -> None:
    rules = HttpRules(default_deadline_s=0.1)
    async with scripted_gateway(Fault(after=0, hang=True), rules=rules) as (_, _http, client):
        assert (await client.post("/v1/completions", json=BODY, timeout=60)).status_code == 408


@pytest.mark.parametrize("trusts", [False, True])
async def test_who_asks_and_the_requests_name_go_on_to_the_server(trusts: bool) -> None:
    async with scripted_gateway(rules=HttpRules(trust_tenant=trusts)) as (service, _http, client):
        sent = {"authorization": "Bearer mine", "x-request-id": "name-1", "baton-tenant": "we", "traceparent": TRACE}
        body = BODY | {"priority": "batch", "cache_salt": "mine"}
        answer = await client.post("/v1/completions", json=body, headers=sent)
        assert answer.headers["x-request-id"] == "name-1" and answer.json()["id"] == "name-1"
        (metadata,), (request,) = service.metadata, service.requests
        assert (metadata["authorization"], metadata.get("baton-tenant")) == ("Bearer mine", "we" if trusts else None)
        assert metadata["traceparent"] == TRACE
        assert (request.request_id, request.model, tuple(request.token_ids.ids)) == ("name-1", MODEL.name, ids_of("Hi"))
        assert (
            request.priority == 3
            and request.cache_salt == "mine"
            and not request.seeded
            and request.sampling.temperature == 1.0
        )
        odd = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "a b"})
        assert odd.headers["x-request-id"].startswith("cmpl-")


@pytest.mark.parametrize("num_chars", [1, MAX_REQUEST_ID_CHARS])
async def test_a_requests_name_of_any_length_is_that_of_each_of_its_prompts(num_chars: int) -> None:
    async with scripted_gateway() as (service, _http, client):
        name = "x" * num_chars
        sent = BODY | {"prompt": ["Hi"] * 11}
        answer = await client.post("/v1/completions", json=sent, headers={"x-request-id": name})
        assert answer.status_code == 200 and answer.headers["x-request-id"] == name
        ids = {each.request_id for each in service.requests}
        assert len(ids) == 11 and all(len(each) <= MAX_REQUEST_ID_CHARS for each in ids)


@pytest.mark.parametrize("says_length", [True, False])
async def test_a_body_that_is_too_long_is_refused(says_length: bool) -> None:
    async with scripted_gateway() as (_, _http, client):

        async def content() -> AsyncIterator[bytes]:
            for _ in range(MAX_BODY_BYTES // 2**20 + 1):
                yield b" " * 2**20

        sent: Any = b" " * (MAX_BODY_BYTES + 1) if says_length else content()
        answer = await client.post("/v1/completions", content=sent, headers={"content-type": "application/json"})
        assert answer.status_code == 413 and "limit" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 1}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["Hi"] * 65}, "prompt"),
        ({"prompt": [[5000]]}, "prompt"),
        ({"prompt": "Hi", "suffix": "there"}, "suffix"),
        ({"prompt": "Hi", "best_of": 2}, "best_of"),
        (b"{", None),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused_in_the_same_shape(body: Any, param: str | None) -> None:
    async with scripted_gateway() as (_, _http, client):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert error["param"] == param


async def test_fields_of_vllm_reach_the_server() -> None:
    asked = {"top_k": 5, "min_p": 0.5, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [7]}
    asked |= {"include_stop_str_in_output": True, "ignore_eos": True}
    async with scripted_gateway() as (service, _http, client):
        for path, body in (("completions", BODY), ("responses", {"input": "Hi"})):
            await client.post(f"/v1/{path}", json=body | asked)
            sampling = service.requests[-1].sampling
            assert {name: getattr(sampling, name) for name in asked} == asked


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"content-type": "application/x-www-form-urlencoded"}, "content-type is 'application/x-www-form-urlencoded'"),
        ({}, "content-type is ''"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "content-encoding is 'gzip'"),
    ],
)
async def test_a_body_that_is_not_json_by_its_headers_is_refused(headers: dict[str, str], named: str) -> None:
    async with scripted_gateway() as (_, _http, client):
        content = json.dumps(BODY).encode()
        answer = await client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 415 and answer.json()["error"]["message"].startswith(named)


async def test_a_path_that_is_not_there_is_said_in_the_same_shape() -> None:
    async with scripted_gateway() as (_, _http, client):
        answer = await client.get("/v1/nothing")
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
        assert (await client.get("/v1/completions")).status_code == 405


async def test_a_page_of_another_site_is_refused_unless_its_origin_is_allowed() -> None:
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with scripted_gateway() as (service, _http, client):
        for path in ("/v1/models", "/console/", "/console/api/state"):
            assert (await client.get(path, headers={"host": "attacker.example"})).status_code == 421
        for headers in ({"host": "attacker.example", "origin": "http://attacker.example"}, {"origin": PAGE}):
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.json()["error"]["type"] in ("invalid_request_error", "permission_error")
        refused = await client.options("/v1/completions", headers=asks)
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
        assert not service.requests and not service.looks
    async with scripted_gateway(rules=HttpRules(allow_origins=(PAGE,))) as (_, _http, client):
        allowed = await client.options("/v1/completions", headers=asks)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-headers"] == "authorization"
        for body, status in ((BODY, 200), ({}, 400)):
            answer = await client.post("/v1/completions", json=body, headers={"origin": PAGE})
            assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE


async def test_text_becomes_token_ids_and_back() -> None:
    async with scripted_gateway() as (_, _http, client):
        found = (await client.post("/tokenize", json={"prompt": "Hi"})).json()
        assert found == {"count": 2, "max_model_len": MODEL.max_tokens, "tokens": list(ids_of("Hi"))}
        for text in ("Hi", "<s>Hi</s>"):
            tokens = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
            assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
            answer = await client.post("/v1/completions", json=BODY | {"prompt": tokens, "echo": True})
            assert answer.json()["choices"][0]["text"] == text + text_of(3)
        assert (await client.post("/detokenize", json={"tokens": [-1]})).status_code == 400
        assert (await client.post("/tokenize", json={})).status_code == 400


async def test_what_asks_for_nothing_is_taken() -> None:
    async with scripted_gateway() as (service, _http, client):
        sent = BODY | {"suffix": "", "best_of": 1, "stop_token_ids": [28, 28]}
        assert (await client.post("/v1/completions", json=sent)).status_code == 200
        assert list(service.requests[0].sampling.stop_token_ids) == [28]


async def test_a_model_is_as_old_as_its_gateway() -> None:
    began = int(time.time())
    async with scripted_gateway() as (_, _http, client):
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert began <= model["created"] <= time.time()


async def test_operators_see_whether_it_serves_and_what_it_answered() -> None:
    async with scripted_gateway() as (_, _http, client):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503  # the script has no health service
        for path, status in (("/health", 200), ("/ready", 503), ("/metrics", 200)):
            asked = await client.head(path)
            assert (asked.status_code, asked.content) == (status, b"")
        await client.post("/v1/completions", json=BODY)
        await client.post("/v1/completions", json={})
        samples = await metrics(client)
        assert samples[*OF_ROUTE, ("status", "200")] == samples[*OF_ROUTE, ("status", "400")] == 1
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/health"} <= paths.keys()
