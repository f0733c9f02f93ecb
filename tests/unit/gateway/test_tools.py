"""Calls of tools and reasoning through OpenAI's own client: what the model writes, whole and in deltas."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.v1 import orchestrator_pb2
from tests.support.clusters.scripted_orchestrator import MODEL, ScriptedOrchestrator, serving
from tests.support.models.tool_templates import MAY_THINK, SPECIAL, TEMPLATES, letters, tool_tokenizer
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "time")
]
CHAT: list[Any] = [{"role": "user", "content": "Weather and time?"}]
TWO = [("weather", '{"city": "Paris"}'), ("time", "{}")]
HERMES = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
LLAMA3 = '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "time", "parameters": {}}'
MISTRAL = '[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": {}}]'
SMOLLM2 = f"<tool_call>{MISTRAL}</tool_call>"
Words = Sequence[tuple[int, str]]


def special(text: str) -> Words:
    """A token that has no text of its own."""
    return [(97 + SPECIAL.index(text), "")]


ANSWERS: dict[str, tuple[Words, str | None]] = {
    "hermes": (letters(HERMES), "Let me see."),
    "llama3": (letters(LLAMA3), None),
    "llama3 with its marker": ([*special("<|python_tag|>"), *letters(LLAMA3)], None),
    "mistral": ([*special("[TOOL_CALLS]"), *letters(MISTRAL)], None),
    "smollm2": (letters(SMOLLM2), None),
}


@asynccontextmanager
async def answering(
    words: Words, template: str, folder: Path
) -> AsyncIterator[tuple[openai.AsyncOpenAI, list[orchestrator_pb2.GenerateRequest]]]:
    """A client of a model that writes these words, and what the model is asked."""
    service = ScriptedOrchestrator(words=words)
    async with serving(service) as target, http_gateway(target, tool_tokenizer(folder, template)) as http:
        yield http.openai, service.requests


async def streamed(client: openai.AsyncOpenAI, **more: Any) -> dict[str, Any]:
    """What a stream of one choice adds up to."""
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finishes": [], "num_deltas": 0}
    stream: Any = await client.chat.completions.create(model=MODEL.name, messages=CHAT, stream=True, **more)
    async for chunk in stream:
        (choice,) = chunk.choices
        made["content"] += choice.delta.content or ""
        made["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        made["finishes"] += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or ():
            made["num_deltas"] += 1
            if call.id:
                made["calls"][call.index] = [call.function.name, "", call.id]
            made["calls"][call.index][1] += call.function.arguments
    return made


@pytest.mark.parametrize("name", ANSWERS)
async def test_calls_come_whole_and_in_deltas(name: str, tmp_path: Path) -> None:
    words, content = ANSWERS[name]
    async with answering(words, TEMPLATES[name.split()[0]], tmp_path) as (client, asked):
        answer = await client.chat.completions.create(model=MODEL.name, messages=CHAT, tools=TOOLS, max_tokens=300)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == content
        calls = choice.message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls if call.type == "function"] == TWO
        made = await streamed(client, tools=TOOLS, max_tokens=300)
        assert [(name, arguments) for name, arguments, _ in made["calls"].values()] == TWO
        assert made["content"] == (content or "") and made["finishes"] == ["tool_calls"]
        assert made["num_deltas"] > len(TWO) + 3  # the arguments come in pieces
        assert len({id_ for _, _, id_ in made["calls"].values()}) == 2
        again = [*CHAT, choice.message.model_dump(exclude_none=True)]
        if not name.startswith("llama3"):  # whose template takes one call
            again += [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in calls]
        await client.chat.completions.create(model=MODEL.name, messages=again, tools=TOOLS)
        assert len(asked[2].token_ids.ids) > len(asked[0].token_ids.ids)


async def test_the_clients_own_reader_of_streams_follows(tmp_path: Path) -> None:
    tools = [each | {"function": each["function"] | {"strict": True}} for each in TOOLS]
    async with (
        answering(letters(HERMES), TEMPLATES["hermes"], tmp_path) as (client, _),
        client.chat.completions.stream(model=MODEL.name, messages=CHAT, tools=tools) as stream,
    ):
        final = await stream.get_final_completion()
        (choice,) = final.choices
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        calls = [each.function for each in choice.message.tool_calls or ()]
        assert [(each.name, each.arguments) for each in calls] == TWO


async def test_one_call_if_they_may_not_be_parallel(tmp_path: Path) -> None:
    async with answering(letters(HERMES), TEMPLATES["hermes"], tmp_path) as (client, _):
        more: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
        answer = await client.chat.completions.create(model=MODEL.name, messages=CHAT, **more)
        assert len(answer.choices[0].message.tool_calls or ()) == 1
        assert len((await streamed(client, **more))["calls"]) == 1


async def test_several_choices_are_read_each_by_itself(tmp_path: Path) -> None:
    async with answering(letters(HERMES), TEMPLATES["hermes"], tmp_path) as (client, _):
        answer = await client.chat.completions.create(model=MODEL.name, messages=CHAT, tools=TOOLS, n=2)
        assert [len(each.message.tool_calls or ()) for each in answer.choices] == [2, 2]
        assert [each.index for each in answer.choices] == [0, 1]


async def test_without_tools_what_looks_like_a_call_is_text(tmp_path: Path) -> None:
    async with answering(letters(HERMES), TEMPLATES["hermes"], tmp_path) as (client, _):
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            asked: dict[str, Any] = {"model": MODEL.name, "messages": CHAT, **more}
            answer = await client.chat.completions.create(**asked)
            assert answer.choices[0].message.content == HERMES and answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].message.tool_calls is None


async def test_an_answer_that_is_cut_off_in_a_call_says_so(tmp_path: Path) -> None:
    async with answering(letters(HERMES), TEMPLATES["hermes"], tmp_path) as (client, _):
        answer = await client.chat.completions.create(model=MODEL.name, messages=CHAT, tools=TOOLS, max_tokens=70)
        (choice,) = answer.choices
        assert choice.finish_reason == "length" and len(choice.message.tool_calls or ()) == 1


async def test_reasoning_has_a_field_of_its_own(tmp_path: Path) -> None:
    words = letters("<think>\nParis?\n</think>\n\nSunny.")
    async with answering(words, MAY_THINK, tmp_path) as (client, _):
        answer = await client.chat.completions.create(model=MODEL.name, messages=CHAT)
        message: Any = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Paris?", "Sunny.")
        made = await streamed(client)
        assert (made["reasoning"], made["content"], made["finishes"]) == ("Paris?", "Sunny.", ["stop"])


async def test_every_token_has_its_logprob_also_within_a_call(tmp_path: Path) -> None:
    async with answering(letters(SMOLLM2), TEMPLATES["smollm2"], tmp_path) as (client, _):
        asked: dict[str, Any] = {"model": MODEL.name, "messages": CHAT, "tools": TOOLS, "max_tokens": 300}
        asked["logprobs"] = True
        answer = await client.chat.completions.create(**asked)
        assert answer.choices[0].logprobs is not None
        whole = [each.token for each in answer.choices[0].logprobs.content or ()]
        parts: list[str] = []
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            scored = chunk.choices[0].logprobs
            parts += [each.token for each in (scored.content if scored else None) or ()]
        assert whole == parts == list(SMOLLM2)


NAMED: Any = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(("choice", "calls"), [("required", TWO), (NAMED, TWO[1:])], ids=["required", "named"])
async def test_a_model_that_must_call_writes_a_list_of_calls_whatever_its_family(
    choice: Any, calls: list[tuple[str, str]], tmp_path: Path
) -> None:
    written = json.dumps([{"name": name, "arguments": json.loads(given)} for name, given in calls])
    for template in TEMPLATES.values():
        async with answering(letters(written), template, tmp_path) as (client, asked):
            more: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
            made = await streamed(client, **more)
            assert [(name, arguments) for name, arguments, _ in made["calls"].values()] == calls
            assert (made["content"], made["finishes"]) == ("", ["tool_calls"])
            schema = json.loads(asked[0].sampling.structured_output.json)
        items = schema["items"]["anyOf"]
        assert [each["properties"]["name"]["const"] for each in items] == [name for name, _ in calls]
        assert schema.get("maxItems") == (None if choice == "required" else 1)


@pytest.mark.parametrize(("num_tokens", "arguments"), [(8, []), (45, ['{"city": "P'])])
async def test_a_required_call_that_is_cut_off_is_no_text(
    num_tokens: int, arguments: list[str], tmp_path: Path
) -> None:
    written = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
    async with answering(letters(written), TEMPLATES["hermes"], tmp_path) as (client, _):
        more: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": num_tokens}
        (choice,) = (await client.chat.completions.create(model=MODEL.name, messages=CHAT, **more)).choices
        made = await streamed(client, **more)
    assert (choice.finish_reason, made["finishes"]) == ("length", ["length"])
    assert not choice.message.content and not made["content"]
    calls = [each.function.arguments for each in choice.message.tool_calls or () if each.type == "function"]
    assert calls == arguments == [each[1] for each in made["calls"].values()]


async def test_an_obliged_call_and_another_form_exclude_each_other(tmp_path: Path) -> None:
    more: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    async with answering(letters("[]"), TEMPLATES["hermes"], tmp_path) as (client, asked):
        with pytest.raises(openai.BadRequestError, match="obliges to a call") as refused:
            await client.chat.completions.create(model=MODEL.name, messages=CHAT, **more)
        assert refused.value.param == "tool_choice" and not asked
