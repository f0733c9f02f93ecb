"""The items that a response was made from, as OpenAI's own client lists them, page by page."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from tests.support.clusters.scripted_orchestrator import MODEL, ScriptedOrchestrator, serving
from tests.support.models.tool_templates import HERMES, letters, tool_tokenizer
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BRIEF = "{%- for message in messages %}{{ message.content }}{%- endfor %}"
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


@asynccontextmanager
async def answering(folder: Path, text: str, template: str = HERMES) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(ScriptedOrchestrator(words=letters(text))) as target,
        http_gateway(target, tool_tokenizer(folder, template)) as http,
    ):
        yield http.openai


async def listed(client: openai.AsyncOpenAI, response_id: str, **how: Any) -> list[Any]:
    """All items, each checked against the client's types, read page after page."""
    found = [item async for item in client.responses.input_items.list(response_id, **how)]
    for item in found:
        ITEM.validate_python(item.to_dict())
    return found


async def test_all_that_an_answer_was_made_from_is_listed(tmp_path: Path) -> None:
    async with answering(tmp_path, f"Well. {CALL}") as client:
        asked: dict[str, Any] = {"model": MODEL.name, "tools": [TOOL], "max_output_tokens": 200}
        first = await client.responses.create(input="Hi", instructions="Be kind.", **asked)
        (message,) = await listed(client, first.id)
        assert (message.role, message.content[0].type, message.content[0].text) == ("user", "input_text", "Hi")
        call = first.output[1]
        assert call.type == "function_call"
        answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
        second = await client.responses.create(input=[answer], previous_response_id=first.id, **asked)
        items = await listed(client, second.id, order="asc")
        assert [each.type for each in items] == ["message", "message", "function_call", "function_call_output"]
        assert [each.id for each in items[:3]] == [message.id, *(each.id for each in first.output)]
        assert (items[1].role, items[1].content[0].text) == ("assistant", "Well.")
        assert (items[2].name, items[2].arguments) == ("weather", '{"city": "Paris"}')
        assert (items[3].call_id, items[3].output, items[3].status) == (call.call_id, "21 degrees", "completed")


async def test_a_refusal_goes_back_as_it_came(tmp_path: Path) -> None:
    async with answering(tmp_path, "Yes") as client:
        refusal = {"type": "refusal", "refusal": "no"}
        text = {"type": "output_text", "text": "Hm.", "annotations": [], "logprobs": []}
        said: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [text, refusal]}]
        made = await client.responses.create(model=MODEL.name, input=said)
        last, _ = await listed(client, made.id)
        assert [part.to_dict() for part in last.content] == [text, refusal]


@pytest.mark.parametrize(("limit", "num_pages"), [(1, 5), (2, 3), (5, 1), (100, 1)])
@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_follow_each_other_in_either_order(limit: int, num_pages: int, order: str, tmp_path: Path) -> None:
    texts = ["one", "two", "three", "four", "five"]
    async with answering(tmp_path, "Yes") as client:
        said: list[Any] = [{"role": "user", "content": text} for text in texts]
        made = await client.responses.create(model=MODEL.name, input=said)
        how: Any = {"limit": limit, "order": order}
        found = [each.content[0].text for each in await listed(client, made.id, **how)]
        assert found == (texts if order == "asc" else texts[::-1])
        page = await client.responses.input_items.list(made.id, **how)
        numbers = [len(page.data)]
        while page.has_next_page():
            page = await page.get_next_page()
            numbers.append(len(page.data))
        assert len(numbers) == num_pages and sum(numbers) == len(texts)


async def test_the_newest_twenty_come_first_unless_asked_otherwise(tmp_path: Path) -> None:
    async with answering(tmp_path, "Yes", BRIEF) as client:
        said: list[Any] = [{"role": "user", "content": str(number)} for number in range(25)]
        made = await client.responses.create(model=MODEL.name, input=said)
        page: Any = await client.responses.input_items.list(made.id)
        assert [each.content[0].text for each in page.data] == [str(number) for number in range(24, 4, -1)]
        assert page.has_more and (page.first_id, page.last_id) == (page.data[0].id, page.data[-1].id)
        rest: Any = await client.responses.input_items.list(made.id, after=page.last_id)
        assert [each.content[0].text for each in rest.data] == ["4", "3", "2", "1", "0"] and not rest.has_more
        end: Any = await client.responses.input_items.list(made.id, after=rest.last_id)
        assert (end.data, end.first_id, end.last_id, end.has_more) == ([], None, None, False)


async def test_an_id_that_comes_twice_is_kept_once(tmp_path: Path) -> None:
    async with answering(tmp_path, "Yes") as client:
        said: list[Any] = [{"role": "user", "content": text, "id": "msg_1"} for text in ("one", "two")]
        made = await client.responses.create(model=MODEL.name, input=said)
        items = await listed(client, made.id, limit=1, order="asc")
        assert [each.content[0].text for each in items] == ["one", "two"]
        assert items[0].id == "msg_1" != items[1].id


async def test_what_is_wrong_is_named_and_others_find_nothing(tmp_path: Path) -> None:
    async with answering(tmp_path, "Yes") as client:
        made = await client.responses.create(model=MODEL.name, input="Hi")
        for param, value in (("limit", 0), ("limit", 101), ("order", "up"), ("after", "msg_none")):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.input_items.list(made.id, **{param: value})  # type: ignore[arg-type]
            assert refused.value.param == param
        with pytest.raises(openai.NotFoundError):
            await client.with_options(api_key="another").responses.input_items.list(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list("resp_none")
