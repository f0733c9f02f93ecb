"""Values that could not be written again are refused by the name of their field, before the server is asked."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.limits import MAX_NESTING, MAX_REPEATED_BYTES, MAX_TEMPLATE_VALUES
from tests.support.clusters.scripted_orchestrator import ScriptedOrchestrator, serving
from tests.support.models.tool_templates import HERMES, letters, tool_tokenizer
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

HALF = "\ud83d"
NAN = float("nan")
COMPLETION: dict[str, Any] = {"prompt": "Hi", "max_tokens": 3}
RESPONSE: dict[str, Any] = {"input": "Hi", "max_output_tokens": 3}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}


def tool(parameters: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", "parameters": parameters}], "tool_choice": "none"}


def form(**more: object) -> dict[str, Any]:
    return {"text": {"format": {"type": "text", **more}}}


def nested(num_levels: int) -> Any:
    """Objects and lists within each other."""
    value: Any = 1
    for level in range(num_levels):
        value = [value] if level % 2 else {"a": value}
    return value


@asynccontextmanager
async def answering(folder: Path) -> AsyncIterator[tuple[ScriptedOrchestrator, httpx2.AsyncClient]]:
    service = ScriptedOrchestrator(words=letters("Hello"))
    async with (
        serving(service) as target,
        http_gateway(target, tool_tokenizer(folder, HERMES)) as http,
        httpx2.AsyncClient(base_url=http.url, timeout=60) as client,
    ):
        yield service, client


async def post(client: httpx2.AsyncClient, path: str, body: dict[str, Any], *, stream: bool) -> httpx2.Response:
    """Send a body, in which texts may have halves of surrogate pairs, and numbers may be NaN."""
    content = json.dumps(body | {"stream": stream}).encode()
    return await client.post(path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "more", "param", "where"),
    [
        ("/v1/responses", {"metadata": {"k": HALF}}, "metadata", "metadata.k"),
        ("/v1/responses", {"metadata": {HALF: "v"}}, "metadata", "metadata"),
        ("/v1/responses", {"user": HALF}, "user", "user"),
        ("/v1/responses", form(name=HALF), "text", "text.format.name"),
        ("/v1/responses", form(other=[0, HALF]), "text", "text.format.other[1]"),
        ("/v1/responses", form(other=NAN), "text", "text.format.other"),
        ("/v1/responses", tool({"a b": {"c": HALF}}), "tools", "tools[0].parameters.'a b'.c"),
        ("/v1/responses", tool({HALF: 1}), "tools", "tools[0].parameters"),
        ("/v1/responses", tool({"c": [NAN]}), "tools", "tools[0].parameters.c[0]"),
        ("/v1/responses", tool({"c": float("-inf")}), "tools", "tools[0].parameters.c"),
        ("/v1/completions", {"structured_outputs": {HALF: 1}}, "structured_outputs", "structured_outputs"),
        ("/v1/completions", {"temperature": NAN}, "temperature", "temperature"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}, "messages", "messages[0].content"),
    ],
    ids=lambda value: value if isinstance(value, str) and value[0] != "/" else "",
)
async def test_a_value_that_is_no_json_is_refused_by_its_name(
    path: str, more: dict[str, Any], param: str, where: str, *, stream: bool, tmp_path: Path
) -> None:
    async with answering(tmp_path) as (service, client):
        answer = await post(client, path, PATHS[path] | more, stream=stream)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert error["message"].startswith(f"{where} holds ")
        assert not service.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "make", "param", "num_around"),
    [
        ("/v1/responses", tool, "tools", 3),
        ("/v1/responses", lambda value: form(other=value), "text", 3),
        ("/v1/responses", lambda value: {"chat_template_kwargs": {"a": value}}, "chat_template_kwargs", 2),
        ("/v1/chat/completions", lambda value: {"chat_template_kwargs": {"a": value}}, "chat_template_kwargs", 2),
        (
            "/v1/completions",
            lambda value: {"response_format": {"type": "text", "a": value}},
            "response_format",
            2,
        ),
    ],
    ids=["tools", "text", "kwargs of responses", "kwargs of chats", "response_format"],
)
async def test_nesting_has_a_limit_up_to_which_everything_is_answered(
    path: str,
    make: Callable[[object], dict[str, Any]],
    param: str,
    num_around: int,
    *,
    stream: bool,
    tmp_path: Path,
) -> None:
    async with answering(tmp_path) as (service, client):
        served = await post(client, path, PATHS[path] | make(nested(MAX_NESTING - num_around)), stream=stream)
        assert served.status_code == 200 and len(service.requests) == 1
        if stream:
            last = served.text.strip().split("\n")[-1]
            assert last == "data: [DONE]" or json.loads(last.removeprefix("data: "))["type"] == "response.incomplete"
        for num_more in (1, 100, 500):
            deep = make(nested(MAX_NESTING - num_around + num_more))
            answer = await post(client, path, PATHS[path] | deep, stream=stream)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert "nested too deeply" in error["message"]
        assert len(service.requests) == 1


ARGUMENTS = [
    ("[" * 100_000, "has 100000 lists and objects"),
    ('{"a": ' + "[" * 127 + "]" * 127 + "}", ""),
    ('{"a": ' + "[" * 128 + "]" * 128 + "}", "is nested too deeply"),
    ('{"a": ' + "[" * 800 + "]" * 800 + "}", "is nested too deeply"),
    ('{"<|im_end|>": "\\ud83d"}', "holds half of a surrogate pair"),
    ('{"\\ud83d": 1}', "holds half of a surrogate pair"),
    ('{"a": NaN}', "holds NaN"),
    ('{"a": 1e999}', "holds 1e999"),
    ("{", "is not valid JSON"),
    ("1" * 5000, "is not valid JSON"),
    ("[1]", "is not an object"),
    (json.dumps({"a": [0] * (MAX_TEMPLATE_VALUES + 1)}), "holds over 32768 values"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(("arguments", "reason"), ARGUMENTS, ids=[text[:24] for text, _ in ARGUMENTS])
async def test_json_within_a_text_is_checked_as_the_body_is(
    path: str, arguments: str, reason: str, stream: bool, tmp_path: Path
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "1", "content": "21"}
    if path == "/v1/responses":
        items = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}]
        body = RESPONSE | {"input": [*items, {"type": "function_call_output", "call_id": "1", "output": "21"}]}
    else:
        body = CHAT | {"messages": [{"role": "assistant", "tool_calls": [call]}, result]}
    async with answering(tmp_path) as (service, client):
        answer = await post(client, path, body, stream=stream)
        if not reason:
            assert answer.status_code == 200 and service.requests
            return
        error = answer.json()["error"]
        param = "input" if path == "/v1/responses" else "messages"
        assert (answer.status_code, error["param"]) == (400, param)
        assert reason in error["message"] and not service.requests
        if "values" not in reason:
            assert error["message"].startswith(f"{param}[0].tool_calls[0].function.arguments")


@pytest.mark.parametrize("field", [{"user": "u"}, {"metadata": {"k": "u"}}, {"instructions": "u"}])
async def test_a_response_repeats_no_more_than_a_limit(field: dict[str, Any], tmp_path: Path) -> None:
    long = json.loads(json.dumps(field).replace('"u"', f'"{"u" * MAX_REPEATED_BYTES}"'))
    async with answering(tmp_path) as (service, client):
        answer = await post(client, "/v1/responses", RESPONSE | long, stream=True)
        assert answer.status_code == 400 and not service.requests
