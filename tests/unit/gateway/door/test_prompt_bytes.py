"""Prompts of more bytes than a prompt may have are refused before anything is tokenized, by any tokenizer."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from baton.errors import UnauthenticatedError
from baton.text.tokenizer import Tokenizer
from gateway import reading
from tests.support.kernels.os_memory import peak_bytes, reset_peak
from tests.support.models.tiny_tokenizer import chat_letters
from tests.support.models.tool_templates import HERMES, tool_tokenizer
from tests.support.wire.hostile.bodies import answer_of
from tests.support.wire.http_gateway import scripted_gateway

pytestmark = pytest.mark.integration

LONG = "a " * (15 * 2**19)
MOST_S = 0.5
NUM_TRIES = 3
"""Number of tries for a body, because another process may delay a single one."""
MOST_BYTES = 200 * 2**20


def bodies(text: str, *, has_tools: bool) -> dict[str, list[dict[str, Any]]]:
    """Bodies with a text in each place of a prompt, by path. `has_tools` is true if a chat may have tools."""
    message = {"role": "user", "content": text}
    parts = {"role": "user", "content": [{"type": "text", "text": text}]}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
    chats = [{"messages": [message]}, {"messages": [parts]}]
    function = {"name": "f", "description": text}
    user = {"role": "user", "content": "a"}
    tools = [
        {"messages": [user, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [user], "tools": [{"type": "function", "function": function}]},
    ]
    return {
        "/v1/completions": [{"prompt": text}, {"prompt": ["a", text]}],
        "/v1/chat/completions": [
            *chats,
            {"messages": [user], "chat_template_kwargs": {"a": text}},
            *(tools if has_tools else ()),
        ],
        "/v1/responses": [{"input": text}, {"input": "a", "instructions": text}],
        "/tokenize": [{"prompt": text}, *chats],
    }


async def check(tokenizer: Tokenizer, *, has_tools: bool) -> None:
    """Send all bodies to a gateway with this tokenizer: each is refused, and costs little."""
    async with scripted_gateway(tokenizer=tokenizer) as (service, http, _client):
        for path, sent in bodies(LONG, has_tools=has_tools).items():
            for body in sent:
                content = json.dumps(body).encode()
                tries: list[float] = []
                status, answer = 0, b""
                while not tries or (min(tries) >= MOST_S and len(tries) < NUM_TRIES):
                    reset_peak()
                    before, before_s = peak_bytes(), time.process_time()
                    status, answer = await asyncio.to_thread(answer_of, http.port, path, content)
                    tries.append(time.process_time() - before_s)
                    assert peak_bytes() - before < MOST_BYTES
                error = json.loads(answer)["error"]
                assert status == 400, error
                assert error["code"] == "context_length_exceeded", error
                assert min(tries) < MOST_S, (path, tries)
        assert not service.requests


async def test_a_prompt_of_15_mib_is_refused_before_it_is_tokenized(smollm2: Path) -> None:
    await check(Tokenizer.load(smollm2), has_tools=False)


async def test_a_prompt_is_refused_by_its_bytes_where_tokens_have_no_bound(tmp_path: Path) -> None:
    tokenizer = tool_tokenizer(tmp_path, HERMES)
    assert tokenizer.min_tokens(LONG) == 0
    await check(tokenizer, has_tools=True)


async def test_who_has_no_key_gets_no_other_answer_for_it(tmp_path: Path) -> None:
    async with scripted_gateway(tokenizer=chat_letters(tmp_path)) as (service, http, _client):
        service.refuses_callers = UnauthenticatedError("send a key")
        for path, sent in bodies(LONG, has_tools=False).items():
            status, _ = await asyncio.to_thread(answer_of, http.port, path, json.dumps(sent[0]).encode())
            assert status == 401


async def test_the_limit_is_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_PROMPT_BYTES", 10)
    async with scripted_gateway(tokenizer=chat_letters(tmp_path)) as (_, _http, client):
        assert (await client.post("/tokenize", json={"prompt": "\u00e9" * 5})).status_code == 200
        answer = await client.post("/tokenize", json={"prompt": "\u00e9" * 5 + "a"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "prompt") and "has 11 bytes" in error["message"]
