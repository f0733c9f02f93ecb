"""LangChain's model of chats, unmodified, against real engines behind a real gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from baton import AsyncClient
from baton.text.tokenizer import Tokenizer
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import cluster
from tests.support.clusters.scripted_orchestrator import ScriptedOrchestrator, serving
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import write_letters
from tests.support.models.tool_templates import TEMPLATES, letters, tool_tokenizer
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{%- for message in messages %}<{{ message.role }}>{{ message.content }}{%- for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{%- endfor %}{%- endfor %}<assistant>"
)
"""Few characters, as the tiny model has room for 400 tokens."""
CHAT = [SystemMessage("Be brief."), HumanMessage("Hi")]


class Trip(BaseModel):
    """Where to go, and how."""

    city: Literal["Paris", "Rome"]
    by: Literal["car", "train"]
    returns: bool


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_letters(tmp_path_factory.mktemp("letters"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(folder)


@asynccontextmanager
async def chatting(target: str, tokenizer: Tokenizer, **more: Any) -> AsyncIterator[ChatOpenAI]:
    """The model, with connections that end with the block: LangChain would keep its own for the whole process."""
    async with http_gateway(target, tokenizer) as http, AsyncClient(target) as direct, httpx2.AsyncClient() as pool:
        yield ChatOpenAI(
            model=(await direct.model()).name,
            base_url=f"{http.url}/v1",
            api_key=SecretStr("any"),
            http_async_client=pool,
            max_retries=0,
            **more,
        )


@asynccontextmanager
async def served(tokenizer: Tokenizer, **more: Any) -> AsyncIterator[tuple[ChatOpenAI, AsyncClient]]:
    """The model by real engines, and Baton's own client of them."""
    async with cluster() as made:
        target = f"{HOST}:{made.server.port}"
        async with chatting(target, tokenizer, **more) as model, AsyncClient(target) as direct:
            yield model, direct


async def added_up(stream: AsyncIterator[AIMessage]) -> AIMessage:
    """The message that the chunks of a stream make."""
    made = AIMessageChunk(content="")
    async for chunk in stream:
        assert isinstance(chunk, AIMessageChunk)
        made += chunk
    return made


async def test_an_answer_and_its_stream_are_what_batons_client_gets(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    async with served(tokenizer, temperature=0.7, seed=5, max_completion_tokens=12, stream_usage=True) as (
        model,
        direct,
    ):
        expected = await direct.generate(token_ids=token_ids, temperature=0.7, seed=5, max_tokens=12).collect()
        answer = await model.ainvoke(CHAT)
        assert answer.content == expected.text and expected.usage is not None
        usage = answer.usage_metadata
        assert usage is not None and usage["input_tokens"] == len(token_ids)
        assert usage["output_tokens"] == expected.usage.num_output_tokens
        assert answer.response_metadata["finish_reason"] in ("length", "stop")
        streamed, num_chunks = AIMessageChunk(content=""), 0
        async for chunk in model.astream(CHAT):
            assert isinstance(chunk, AIMessageChunk)
            streamed, num_chunks = streamed + chunk, num_chunks + 1
        assert streamed.content == answer.content and num_chunks > expected.usage.num_output_tokens
        assert streamed.usage_metadata is not None
        assert streamed.usage_metadata["total_tokens"] == usage["total_tokens"]


async def test_a_thread_is_answered_too(tokenizer: Tokenizer) -> None:
    with httpx2.Client() as pool:
        async with served(tokenizer, temperature=0, max_completion_tokens=6, http_client=pool) as (model, _):
            answer = await asyncio.to_thread(model.invoke, CHAT)
            assert answer.content == (await model.ainvoke(CHAT)).content


async def test_logprobs_come_whole_and_in_a_stream(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, temperature=0, max_completion_tokens=4) as (model, _):
        asked = model.bind(logprobs=True, top_logprobs=2)
        found = (await asked.ainvoke(CHAT)).response_metadata["logprobs"]["content"]
        assert all(each["logprob"] == max(top["logprob"] for top in each["top_logprobs"]) for each in found)
        streamed = await added_up(asked.astream(CHAT))
        assert streamed.response_metadata["logprobs"]["content"] == found


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_is_called_and_its_result_goes_back(streamed: bool, tokenizer: Tokenizer) -> None:
    async with served(tokenizer, temperature=1, seed=1, max_completion_tokens=100) as (model, _):
        obliged = model.bind_tools([weather], tool_choice="weather", strict=True, parallel_tool_calls=False)
        answer = await added_up(obliged.astream(CHAT)) if streamed else await obliged.ainvoke(CHAT)
        (call,) = answer.tool_calls
        assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome")
        result = await weather.ainvoke(call)
        assert isinstance(result, ToolMessage) and result.content == f"rain in {call['args']['city']}"
        before = (await model.ainvoke(CHAT)).usage_metadata
        after = (await model.bind_tools([weather]).ainvoke([*CHAT, answer, result])).usage_metadata
        assert before is not None and after is not None
        assert after["input_tokens"] > before["input_tokens"] + len(result.content)


async def test_calls_that_the_model_chooses_are_read_with_text_before_them(tmp_path: Path) -> None:
    text = 'So:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    async with (
        serving(ScriptedOrchestrator(words=letters(text))) as target,
        chatting(target, tool_tokenizer(tmp_path, TEMPLATES["hermes"])) as model,
    ):
        answer = await model.bind_tools([weather]).ainvoke(CHAT)
        assert answer.content == "So:"
        assert [(each["name"], each["args"]) for each in answer.tool_calls] == [("weather", {"city": "Rome"})]


async def test_an_output_has_the_form_of_a_class(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, temperature=1, seed=2, max_completion_tokens=200) as (model, _):
        shaped = model.with_structured_output(Trip, method="json_schema", include_raw=True)
        found = await shaped.ainvoke(CHAT)
        assert isinstance(found, dict) and isinstance(found["parsed"], Trip), found
        assert Trip.model_validate(json.loads(found["raw"].content)) == found["parsed"]
        by_call = model.with_structured_output(Trip, method="function_calling", strict=True)
        assert isinstance(await by_call.ainvoke(CHAT), Trip)


async def test_a_timeout_and_a_cancelled_stream_end_the_request(tokenizer: Tokenizer) -> None:
    endless = {"ignore_eos": True}
    async with served(tokenizer, max_completion_tokens=300, extra_body=endless) as (model, direct):
        with pytest.raises(openai.APITimeoutError):
            await model.ainvoke(CHAT, timeout=0.05)
        await eventually(direct.cluster_state, lambda state: state.num_running == 0)

        async def follow(began: asyncio.Event) -> None:
            async for _ in model.astream(CHAT):
                began.set()

        began = asyncio.Event()
        following = asyncio.create_task(follow(began))
        await began.wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await eventually(direct.cluster_state, lambda state: state.num_running == 0)


async def test_what_is_refused_is_openais_error(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (model, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await model.bind(temperature=-1).ainvoke(CHAT)
        assert refused.value.param == "temperature"
        with pytest.raises(ContextOverflowError) as too_long:
            await model.ainvoke("a" * 400)
        assert isinstance(too_long.value, openai.BadRequestError)
        assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "messages")
