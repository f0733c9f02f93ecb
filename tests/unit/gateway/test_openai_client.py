"""OpenAI's own client, unmodified, against real engines behind a real gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from baton import AsyncClient
from baton.text.tokenizer import Tokenizer
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import cluster
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import chat_letters, ids_of, write_letters
from tests.support.models.tokenizers import CHAT_TEMPLATE
from tests.support.wire.http_gateway import Http, http_gateway

pytestmark = pytest.mark.integration

PROMPT = "Once upon a time"
CHAT: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_letters(tmp_path_factory.mktemp("letters"))


@asynccontextmanager
async def served(tokenizer: Tokenizer) -> AsyncIterator[tuple[Http, AsyncClient, str]]:
    """Engines behind: a gateway, Baton's own client, and the model's name."""
    async with cluster() as made:
        target = f"{HOST}:{made.server.port}"
        async with http_gateway(target, tokenizer) as http, AsyncClient(target) as direct:
            yield http, direct, (await direct.model()).name


async def test_a_completion_is_what_batons_client_gets(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (http, direct, name):
        expected = await direct.generate(PROMPT, max_tokens=8, temperature=0.7, seed=5, n=2).collect()
        answer = await http.openai.completions.create(
            model=name, prompt=PROMPT, max_tokens=8, temperature=0.7, seed=5 - 2**64, n=2
        )
        assert [(each.index, each.text) for each in answer.choices] == [
            (each.index, each.text) for each in expected.choices
        ]
        assert {each.finish_reason for each in answer.choices} <= {"length", "stop"}
        assert answer.model == name and answer.object == "text_completion"
        assert answer.usage is not None and expected.usage is not None
        assert answer.usage.prompt_tokens == len(PROMPT) == expected.usage.num_prompt_tokens
        assert answer.usage.completion_tokens == expected.usage.num_output_tokens


async def test_a_stream_brings_the_text_of_the_whole_answer(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (http, _, name):
        asked: dict[str, Any] = {"model": name, "messages": CHAT, "max_completion_tokens": 12, "seed": 3, "n": 2}
        whole = await http.openai.chat.completions.create(**asked)
        texts, usage = {0: "", 1: ""}, None
        finishes: dict[int, str] = {}
        roles: dict[int, str | None] = {}
        ids: set[str] = set()
        async for chunk in await http.openai.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            ids.add(chunk.id)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles.setdefault(choice.index, choice.delta.role)
                if choice.finish_reason:
                    finishes[choice.index] = choice.finish_reason
        assert texts == {each.index: each.message.content for each in whole.choices}
        assert finishes == {each.index: each.finish_reason for each in whole.choices}
        assert roles == {0: "assistant", 1: "assistant"} and len(ids) == 1
        assert usage is not None and usage.model_dump() == (whole.usage and whole.usage.model_dump())


async def test_a_chat_has_room_to_the_models_limit_and_developers_speak_as_systems(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    async with served(tokenizer) as (http, direct, name):
        answer = await http.openai.chat.completions.create(model=name, messages=CHAT, temperature=0)
        assert answer.usage is not None and answer.usage.prompt_tokens == len(token_ids)
        expected = await direct.generate(token_ids=token_ids, max_tokens=answer.usage.completion_tokens).collect()
        assert answer.choices[0].message.content == expected.text
        assert (
            answer.choices[0].finish_reason == "stop" or answer.usage.total_tokens == (await direct.model()).max_tokens
        )
        parts: Any = [{"type": "text", "text": "Be brief."}]
        in_parts: list[Any] = [{"role": "system", "content": parts}, CHAT[1]]
        again = await http.openai.chat.completions.create(model=name, messages=in_parts, temperature=0, max_tokens=3)
        assert again.choices[0].message.content == expected.text[:3]


async def test_logprobs_are_those_of_batons_client(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (http, direct, name):
        expected = await direct.generate(PROMPT, max_tokens=4, logprobs=2, prompt_logprobs=2).collect()
        answer = await http.openai.completions.create(
            model=name, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2, echo=True
        )
        (choice,) = answer.choices
        assert choice.text == PROMPT + expected.text
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        tokens = [*expected.prompt, *expected.choices[0].tokens]
        assert choice.logprobs.token_logprobs == [each.logprob for each in tokens]
        lengths = [len(tokenizer.decode([each.token_id])) for each in tokens]
        assert choice.logprobs.text_offset == [sum(lengths[:place]) for place in range(len(tokens))]
        chat = await http.openai.chat.completions.create(
            model=name, messages=CHAT, max_tokens=2, temperature=0, logprobs=True, top_logprobs=3
        )
        assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
        for entry in chat.choices[0].logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob == max(each.logprob for each in entry.top_logprobs)
            assert entry.bytes == list(entry.token.encode())


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prompt_is_scored_without_output(streamed: bool, tokenizer: Tokenizer) -> None:
    """The letters' first output token may be anything, an end included."""
    async with served(tokenizer) as (http, direct, name):
        asked: dict[str, Any] = {"model": name, "prompt": [PROMPT, "The sea"], "max_tokens": 0, "n": 2, "logprobs": 1}
        scored = [await direct.generate(each, max_tokens=1, prompt_logprobs=1).collect() for each in asked["prompt"]]
        found: list[Any] = [{"text": "", "logprobs": [], "finish": None} for _ in range(4)]
        if streamed:
            more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = [each async for each in await http.openai.completions.create(**asked, **more, echo=True)]
        else:
            chunks = [await http.openai.completions.create(**asked, echo=True)]
        for choice in (each for chunk in chunks for each in chunk.choices):
            part = found[choice.index]
            part["text"] += choice.text
            part["logprobs"] += choice.logprobs.token_logprobs if choice.logprobs else []
            part["finish"] = choice.finish_reason or part["finish"]
        expected = [
            {"text": prompt, "logprobs": [each.logprob for each in one.prompt], "finish": "length"}
            for prompt, one in zip(asked["prompt"], scored, strict=True)
            for _ in range(2)
        ]
        assert found == expected
        usage = chunks[-1].usage
        assert usage is not None and usage.completion_tokens == 0
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await http.openai.completions.create(**asked)


@pytest.mark.parametrize("streamed", [False, True])
async def test_several_prompts_are_answered_in_their_order(streamed: bool, tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (http, direct, name):
        prompts = [PROMPT, "The sea"]
        expected = [(await direct.generate(each, max_tokens=6).collect()).text for each in prompts]
        asked: dict[str, Any] = {"model": name, "max_tokens": 6, "temperature": 0}
        texts = {0: "", 1: ""}
        if streamed:
            async for chunk in await http.openai.completions.create(prompt=prompts, stream=True, **asked):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            answer = await http.openai.completions.create(prompt=[list(ids_of(each)) for each in prompts], **asked)
            texts = {each.index: each.text for each in answer.choices}
            assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, prompts))
        assert [texts[0], texts[1]] == expected


async def test_a_client_that_leaves_cancels_its_request(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (http, direct, name):
        stream = await http.openai.completions.create(
            model=name, prompt=PROMPT, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        await eventually(direct.cluster_state, lambda state: state.num_running == 0)


async def test_models_are_listed_and_others_are_not_found(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (http, _, name):
        assert [each.id async for each in http.openai.models.list()] == [name]
        assert (await http.openai.models.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError):
            await http.openai.models.retrieve("another")
        with pytest.raises(openai.NotFoundError, match="another") as found:
            await http.openai.completions.create(model="another", prompt=PROMPT)
        assert found.value.code == "model_not_found"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"extra_body": {"top_k": 2**40}}, "top_k"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
        "response_format",
    ),
    ({"stop": [""]}, "stop"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"messages": []}, "messages"),
]


async def test_what_is_wrong_is_named(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (http, _, name):
        for wrong, param in WRONG:
            asked: dict[str, Any] = {"model": name, "messages": CHAT, "stream": True}
            with pytest.raises(openai.BadRequestError) as refused:
                await http.openai.chat.completions.create(**asked | wrong)
            assert (refused.value.param, refused.value.type) == (param, "invalid_request_error"), str(refused.value)
            assert "sampling" not in str(refused.value)
            assert refused.value.code == ("context_length_exceeded" if 10_000 in wrong.values() else None)


NOT: dict[str, Any] = {"not": {"type": "string"}}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": NOT}}
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": ["a", ""]}, "prompt is empty"),
    ({"prompt": "a" * 10_000}, "prompt has 10000 tokens"),
    ({"logprobs": 21}, "logprobs = 21"),
    ({"guided_json": NOT}, "guided_json is not supported at #"),
    ({"guided_json": "{"}, "guided_json is not valid JSON"),
    ({"guided_regex": "("}, "guided_regex cannot be compiled"),
    ({"guided_grammar": "start: x"}, "guided_grammar cannot be compiled"),
    ({"guided_choice": []}, "guided_choice sets nothing"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens = 2 with guided_regex"),
    ({"structured_outputs": {"json": NOT}}, "structured_outputs.json is not supported at #"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex cannot be compiled"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar cannot be compiled"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos = True with structured_outputs"),
    ({"response_format": FORM}, "response_format.json_schema.schema is not supported at #"),
    ({"max_completion_tokens": 5}, "max_completion_tokens is not supported: use max_tokens"),
]


async def test_what_the_server_refuses_is_named_as_the_client_named_it(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (http, _, name):
        for wrong, text in WRONG_COMPLETIONS:
            with pytest.raises(openai.BadRequestError) as refused:
                await http.openai.post("/completions", body={"model": name, "prompt": PROMPT} | wrong, cast_to=object)
            error: Any = refused.value.body
            assert error["message"].startswith(text) and "sampling" not in error["message"], error
            assert "structured_output " not in error["message"] and error["param"] == text.split()[0].split(".")[0]


class City(BaseModel):
    """A nested model, which pydantic puts into `$defs`."""

    name: Literal["Paris", "Rome"]


class Kind(Enum):
    """An enumeration, which pydantic puts into `$defs`."""

    SHORT = "short"
    LONG = "long"


class Trip(BaseModel):
    """A function's parameters with references."""

    to: City
    kind: Kind


class Stay(BaseModel):
    """Parameters of another function, with the same definition of `City`."""

    kind: Literal["hotel"]
    city: City


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The letters with a chat template that says that it supports tools."""
    folder = write_letters(tmp_path_factory.mktemp("tools"))
    (folder / "chat_template.jinja").write_text("{% if tools %}{{ tools | length }}{% endif %}" + CHAT_TEMPLATE)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("choice", ["required", "Trip"])
async def test_nested_models_of_pydantic_are_the_arguments_of_required_calls(
    choice: str, with_tools: Tokenizer
) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(each) for each in (Stay, Trip)]
    is_named, kinds = choice == "Trip", (Trip,) if choice == "Trip" else (Stay, Trip)
    of_chat: Any = {"type": "function", "function": {"name": choice}} if is_named else choice
    of_response: Any = {"type": "function", "name": choice} if is_named else choice
    more: dict[str, Any] = {"tools": tools, "parallel_tool_calls": False, "temperature": 1.0}
    async with served(with_tools) as (http, _, name):
        for seed in range(4):
            chat = await http.openai.chat.completions.parse(
                model=name, messages=CHAT, tool_choice=of_chat, seed=seed, **more
            )
            assert chat.choices[0].finish_reason == "tool_calls" and not chat.choices[0].message.content
            calls = chat.choices[0].message.tool_calls or []
            (call,) = list(calls)
            assert isinstance(call.function.parsed_arguments, kinds)
            response = await http.openai.responses.parse(
                model=name, input="Hi", tool_choice=of_response, extra_body={"seed": seed}, **more
            )
            (item,) = response.output
            assert item.type == "function_call" and response.status == "completed"
            assert isinstance(item.parsed_arguments, kinds)
