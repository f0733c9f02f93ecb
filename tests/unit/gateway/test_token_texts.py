"""The text of a single token, wherever it is told, with a tokenizer that drops a space at the start of a text."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.text.tokenizer import Tokenizer
from tests.support.clusters.scripted_orchestrator import MODEL, ScriptedOrchestrator, serving
from tests.support.models.tokenizers import CHAT_TEMPLATE, sentencepiece_core, sentencepiece_tokens, write_folder
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

HELLO = sentencepiece_tokens().index("\u2581hello")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2, "logprobs": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}),
        ("/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"]}),
        ("/console/api/completion", {"prompt": "hello", "max_tokens": 2}),
    ],
)
async def test_a_token_keeps_its_leading_space(tmp_path: Path, path: str, asked: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, sentencepiece_core(), chat_template=CHAT_TEMPLATE))
    service = ScriptedOrchestrator(words=[(HELLO, " hello"), (HELLO, " hello")])
    async with (
        serving(service) as target,
        http_gateway(target, tokenizer) as http,
        httpx2.AsyncClient(base_url=http.url) as client,
    ):
        answer = await client.post(path, json=asked | {"model": MODEL.name})
    assert _token_texts(path, answer.text) == [" hello", " hello"]


def _token_texts(path: str, body: str) -> list[str]:
    match path:
        case "/v1/completions":
            texts: list[str] = json.loads(body)["choices"][0]["logprobs"]["tokens"]
        case "/v1/chat/completions":
            texts = [each["token"] for each in json.loads(body)["choices"][0]["logprobs"]["content"]]
        case "/v1/responses":
            texts = [each["token"] for each in json.loads(body)["output"][0]["content"][0]["logprobs"]]
        case _:
            events = [each.partition("data: ")[2] for each in body.split("\n\n") if each.startswith("event: token")]
            texts = [found["own_text"] for found in map(json.loads, events) if found["id"] is not None]
    return texts
