"""The Responses API as OpenAI's own client sees it, unmodified: objects and events hold to the client's types."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from baton.errors import BatonError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from baton.limits import MAX_ITEMS
from gateway.streaming import FAULT
from tests.support.clusters.scripted_orchestrator import MODEL, Fault, ScriptedOrchestrator, serving, text_of
from tests.support.models.tool_templates import HERMES, MAY_THINK, letters, tool_tokenizer
from tests.support.wire.http_gateway import Http, http_gateway

pytestmark = pytest.mark.integration

TOOL: Any = {"type": "function", "name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASKED: dict[str, Any] = {"model": MODEL.name, "input": "Hi", "max_output_tokens": 50}


@asynccontextmanager
async def answering(
    folder: Path, text: str = "", template: str = HERMES, faults: Sequence[Fault] = ()
) -> AsyncIterator[tuple[Http, ScriptedOrchestrator]]:
    service = ScriptedOrchestrator(faults, letters(text))
    async with serving(service) as target, http_gateway(target, tool_tokenizer(folder, template)) as http:
        yield http, service


def prompt_of(service: ScriptedOrchestrator, number: int) -> str:
    ids = service.requests[number].token_ids.ids
    return "".join("\n" if each == 95 else chr(each + 32) for each in ids)


async def events_of(http: Http, **more: Any) -> list[Any]:
    """The events of a stream, each checked against the client's type of it, in their order."""
    found: list[Any] = []
    async for event in await http.openai.responses.create(**ASKED | more, stream=True):
        type(event).model_validate(event.to_dict())
        assert event.sequence_number == len(found)
        found.append(event)
    return found


def without_ids(response: Response) -> dict[str, Any]:
    made = response.to_dict()
    made |= {"id": "", "created_at": 0}
    for item in made["output"]:  # type: ignore[attr-defined]
        item.pop("id")
        item.pop("call_id", None)
    return made


async def test_a_text_comes_in_the_sequence_of_events_that_clients_know(tmp_path: Path) -> None:
    async with answering(tmp_path, "Hello") as (http, _):
        whole = await http.openai.responses.create(**ASKED)
        Response.model_validate(whole.to_dict())
        assert whole.output_text == "Hello" and whole.status == "completed"
        assert whole.usage is not None
        assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (5, 5, 10)
        events = await events_of(http)
        assert [event.type.removeprefix("response.") for event in events] == [
            *("created", "in_progress", "output_item.added", "content_part.added"),
            *["output_text.delta"] * 5,
            *("output_text.done", "content_part.done", "output_item.done", "completed"),
        ]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
        assert whole.reasoning is not None and whole.reasoning.effort is None
        assert without_ids(events[-1].response) == without_ids(whole)
        assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


async def test_the_clients_own_reader_of_streams_follows(tmp_path: Path) -> None:
    async with answering(tmp_path, f"Well. {CALL}") as (http, _):
        asked: dict[str, Any] = {"model": MODEL.name, "input": "Hi", "tools": [TOOL | {"strict": True}]}
        async with http.openai.responses.stream(**asked) as stream:
            text = "".join([each.delta async for each in stream if each.type == "response.output_text.delta"])
            final = await stream.get_final_response()
        assert text == final.output_text == "Well."
        assert [item.type for item in final.output] == ["message", "function_call"]


async def test_a_call_comes_as_an_item_and_its_answer_goes_back(tmp_path: Path) -> None:
    async with answering(tmp_path, f"Well. {CALL}") as (http, service):
        more: dict[str, Any] = {"tools": [TOOL], "max_output_tokens": 200}
        events = await events_of(http, **more)
        message, call = events[-1].response.output
        assert message.content[0].text == "Well."
        assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Paris"}')
        deltas = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call.arguments and len(deltas) > 3
        (done,) = (each for each in events if each.type == "response.function_call_arguments.done")
        assert (done.arguments, done.item_id, done.output_index) == (call.arguments, call.id, 1)
        answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
        await http.openai.responses.create(
            model=MODEL.name, input=[answer], previous_response_id=events[-1].response.id, **more
        )
        by_hand: list[Any] = [{"role": "user", "content": "Hi"}, *events[-1].response.output, answer]
        await http.openai.responses.create(model=MODEL.name, input=by_hand, **more)
        assert prompt_of(service, 1) == prompt_of(service, 2)
        assert f"Well.\n{CALL}<|im_end|>" in prompt_of(service, 1)
        assert "<tool_response>\n21 degrees\n</tool_response>" in prompt_of(service, 1)


async def test_reasoning_is_an_item_of_its_own(tmp_path: Path) -> None:
    async with answering(tmp_path, "<think>Hm\n</think>\nYes", MAY_THINK) as (http, _):
        events = await events_of(http)
        reasoning, message = events[-1].response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm")
        assert message.content[0].text == "Yes"
        assert events[-1].response.usage.output_tokens_details.reasoning_tokens == 2
        kinds = [each.type for each in events]
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


async def test_options_of_reasoning_are_repeated(tmp_path: Path) -> None:
    async with answering(tmp_path, "Yes") as (http, _):
        made = await http.openai.responses.create(**ASKED, reasoning={"effort": "low", "summary": "auto"})
        assert made.reasoning is not None
        assert (made.reasoning.effort, made.reasoning.summary) == ("low", "auto")


async def test_instructions_are_of_one_answer_alone(tmp_path: Path) -> None:
    async with answering(tmp_path, "Yes") as (http, service):
        first = await http.openai.responses.create(**ASKED, instructions="Be kind.")
        assert first.instructions == "Be kind."
        second = await http.openai.responses.create(**ASKED, previous_response_id=first.id)
        third = await http.openai.responses.create(**ASKED, previous_response_id=second.id)
        assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
        assert prompt_of(service, 0).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi")
        assert "kind" not in prompt_of(service, 1)
        assert prompt_of(service, 2).count("<|im_start|>assistant\nYes") == 2


async def test_what_is_kept_is_found_and_forgotten_by_its_owner_alone(tmp_path: Path) -> None:
    async with answering(tmp_path, "Yes") as (http, _):
        made = await http.openai.responses.create(**ASKED, metadata={"a": "b"})
        assert (await http.openai.responses.retrieve(made.id)).to_dict() == made.to_dict()
        other = http.openai.with_options(api_key="another")
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="is not kept here") as refused:
            await other.responses.create(**ASKED, previous_response_id=made.id)
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(made.id)
        await http.openai.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await http.openai.responses.retrieve(made.id)
        unkept = await http.openai.responses.create(**ASKED, store=False)
        with pytest.raises(openai.NotFoundError):
            await http.openai.responses.retrieve(unkept.id)


async def test_a_key_that_was_revoked_finds_nothing_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.door.access._VALID_S", 0.0)
    async with answering(tmp_path, "Yes") as (http, service):
        made = await http.openai.responses.create(**ASKED)
        for error, expected in (
            (UnauthenticatedError("no such key"), openai.AuthenticationError),
            (UnavailableError("the server restarts"), openai.InternalServerError),
        ):
            service.refuses_callers = error
            with pytest.raises(expected):
                await http.openai.responses.retrieve(made.id)
            with pytest.raises(expected):
                await http.openai.responses.input_items.list(made.id)
            with pytest.raises(expected):
                await http.openai.responses.delete(made.id)
        service.refuses_callers = None
        assert (await http.openai.responses.retrieve(made.id)).id == made.id


async def test_a_conversation_has_a_bounded_number_of_items(tmp_path: Path) -> None:
    async with answering(tmp_path, "Yes") as (http, _):
        items: Any = [{"type": "reasoning", "summary": []}] * (MAX_ITEMS - 2)
        made = await http.openai.responses.create(**ASKED | {"input": [{"role": "user", "content": "Hi"}, *items]})
        for more in ({"previous_response_id": made.id}, {"input": items * 2}):
            with pytest.raises(openai.BadRequestError, match=f"at most {MAX_ITEMS}") as refused:
                await http.openai.responses.create(**ASKED | more)
            assert refused.value.param == "input"


async def test_a_caller_in_another_trace_is_the_same_owner(tmp_path: Path) -> None:
    async with answering(tmp_path, "Yes") as (http, _):
        traces = [{"traceparent": f"00-{'0af7651916cd43dd' * 2}-{number:016x}-01"} for number in (1, 2)]
        made = await http.openai.responses.create(**ASKED, extra_headers=traces[0])
        found = await http.openai.responses.retrieve(made.id, extra_headers=traces[1])
        assert found.id == made.id
        more = await http.openai.responses.create(**ASKED, previous_response_id=made.id, extra_headers=traces[1])
        assert more.previous_response_id == made.id


async def test_an_answer_that_is_cut_off_is_incomplete(tmp_path: Path) -> None:
    async with answering(tmp_path, "Hello") as (http, _):
        events = await events_of(http, max_output_tokens=2)
        assert events[-1].type == "response.incomplete"
        response = events[-1].response
        assert response.incomplete_details.reason == "max_output_tokens"
        assert (response.output[0].status, response.output_text) == ("incomplete", "He")


@pytest.mark.parametrize(("num_tokens", "arguments"), [(8, []), (45, ['{"city": "P'])])
async def test_a_call_that_is_required_and_cut_off_is_no_message(
    num_tokens: int, arguments: list[str], tmp_path: Path
) -> None:
    async with answering(tmp_path, '[{"name": "weather", "arguments": {"city": "Paris"}}]') as (http, _):
        more: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": num_tokens}
        whole = await http.openai.responses.create(**ASKED | more)
        events = await events_of(http, **more)
        assert without_ids(events[-1].response) == without_ids(whole)
        assert (whole.status, whole.output_text) == ("incomplete", "")
        assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
        assert [(each.type, each.status) for each in whole.output] == [("function_call", "incomplete")] * len(arguments)
        assert [each.arguments for each in whole.output if each.type == "function_call"] == arguments
        assert [each.type for each in events if "output_text" in each.type or "content_part" in each.type] == []


async def test_an_error_before_the_first_token_has_its_status_and_a_later_one_its_event(tmp_path: Path) -> None:
    refused = Fault(error=PermissionDeniedError("not this"), before_started=True)
    broken = Fault(after=2, error=BatonError("a bug"))
    async with answering(tmp_path, faults=[refused, refused, broken]) as (http, _):
        for stream in (True, False):
            with pytest.raises(openai.PermissionDeniedError):
                await http.openai.responses.create(**ASKED, stream=stream)
        events = await events_of(http)
        assert events[-1].type == "response.failed" and events[-1].response.error.message == "a bug"
        assert events[-1].response.output_text == "0 1 "


async def test_a_fault_of_this_process_ends_the_stream_with_its_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("gateway.responses.events.ResponseEvents.take", fail)
    async with answering(tmp_path, "Yes") as (http, _):
        events = [event async for event in await http.openai.responses.create(**ASKED, stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None and last.response.error.message == FAULT


async def test_an_empty_answer_is_an_empty_message(tmp_path: Path) -> None:
    async with answering(tmp_path) as (http, _):
        made = await http.openai.responses.create(**ASKED | {"max_output_tokens": 1})
        assert made.output_text == text_of(1)
    async with answering(tmp_path, "\n") as (http, _):
        made = await http.openai.responses.create(**ASKED, tools=[TOOL])
        assert [item.type for item in made.output] == ["message"]


async def test_logprobs_come_with_their_text(tmp_path: Path) -> None:
    async with answering(tmp_path, "Hey") as (http, _):
        events = await events_of(http, include=["message.output_text.logprobs"], top_logprobs=0)
        tokens = [each.token for event in events if event.type.endswith("text.delta") for each in event.logprobs]
        assert tokens == ["H", "e", "y"]
        assert [each.token for each in events[-1].response.output[0].content[0].logprobs] == tokens


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
    ({"input": [{"role": "user"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": -1}, "temperature"),
    ({"n": 2}, "n"),
    ({"truncation": "auto"}, "truncation"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"regex": "a+"}, "regex"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"),
    ({"text": {"format": {"type": "xml"}}}, "text"),
]


@pytest.mark.parametrize(("wrong", "param"), WRONG, ids=lambda each: str(each)[:40])
async def test_what_is_wrong_is_named(wrong: dict[str, Any], param: str, tmp_path: Path) -> None:
    async with answering(tmp_path, "Hi") as (http, service):
        with pytest.raises(openai.BadRequestError) as refused:
            await http.openai.post("/responses", body=ASKED | wrong, cast_to=object)
        assert refused.value.param == param, str(refused.value)
        assert refused.value.code == ("context_length_exceeded" if 10_000 in wrong.values() else None)
        assert not service.requests
