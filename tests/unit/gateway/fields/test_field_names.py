"""Errors speak of fields by the names that the client gave them, whoever found the fault."""

from typing import Any

import pytest

from baton.errors import BatonError, InvalidArgumentError
from baton.sampling_params import params_from_options
from gateway.bodies import ChatBody, CompletionBody
from gateway.errors import FieldNames, error_body
from gateway.fields.names import chat_names, completion_names
from gateway.responses.bodies import ResponsesBody
from gateway.responses.reading import response_names

FUNCTION: dict[str, Any] = {"name": "f", "parameters": {}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "g"}}, {"type": "function", "function": FUNCTION}]
NAMED: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
JSON = "sampling.structured_output.json"
IN_CALL = f"{JSON} is not supported at #/items/anyOf/0/properties/arguments"


def completion(**fields: Any) -> FieldNames:
    return completion_names(CompletionBody.model_validate({"prompt": "Hi"} | fields))


def chat(**fields: Any) -> FieldNames:
    return chat_names(ChatBody.model_validate({"messages": []} | fields))


def response(**fields: Any) -> FieldNames:
    return response_names(ResponsesBody.model_validate({"input": "Hi"} | fields))


CASES: list[tuple[FieldNames, str, str, str | None]] = [
    (completion(), "token_ids is empty: send", "prompt is empty: send", "prompt"),
    (completion(), "sampling.max_tokens = 0 is", "max_tokens = 0 is", "max_tokens"),
    (completion(), "sampling.prompt_logprobs = 21", "logprobs = 21", "logprobs"),
    (completion(), "n = 9 is", "n = 9 is", "n"),
    (completion(guided_regex="a"), "sampling.structured_output.regex cannot", "guided_regex cannot", "guided_regex"),
    (completion(guided_json="{"), f"{JSON} is not valid JSON", "guided_json is not valid JSON", "guided_json"),
    (
        completion(structured_outputs={"json": "{"}),
        f"{JSON} is not valid JSON",
        "structured_outputs.json is not valid JSON",
        "structured_outputs",
    ),
    (completion(), "stop_regex is not supported", "stop_regex is not supported", "stop_regex"),
    (completion(), "model 'sampling.n' is not served", "model 'sampling.n' is not served", "model"),
    (completion(), "the upstream is away", "the upstream is away", None),
    (chat(max_completion_tokens=0), "sampling.max_tokens = 0", "max_completion_tokens = 0", "max_completion_tokens"),
    (chat(max_tokens=0), "sampling.max_tokens = 0", "max_tokens = 0", "max_tokens"),
    (
        chat(max_completion_tokens=1),
        "sampling.min_tokens = 5 is out of range: sampling.max_tokens is 1",
        "min_tokens = 5 is out of range: max_completion_tokens is 1",
        "min_tokens",
    ),
    (chat(), "sampling.logprobs = 21", "top_logprobs = 21", "top_logprobs"),
    (chat(response_format=FORM), f"{JSON} is not", "response_format.json_schema.schema is not", "response_format"),
    (chat(**NAMED), f"{IN_CALL}/anyOf/1: x", "tools[1].function.parameters is not supported at #/anyOf/1: x", "tools"),
    (
        chat(**NAMED),
        f"{JSON} is not supported at #/items/anyOf/0: Pointer '/x' does not exist",
        "tools[1].function.parameters is not supported at #: Pointer '/x' does not exist",
        "tools",
    ),
    (chat(tools=TOOLS, tool_choice="required"), f"{JSON} has 9 bytes", "tools has 9 bytes", "tools"),
    (chat(tools=TOOLS, response_format=FORM), f"{JSON} x", "response_format.json_schema.schema x", "response_format"),
    (response(), "sampling.max_tokens = 0", "max_output_tokens = 0", "max_output_tokens"),
    (response(), "messages[0].role is", "input[0].role is", "input"),
    (response(text={"format": FORM}), f"{JSON} is not", "text.format.schema is not", "text"),
    (response(), "response_format.type is 'xml'", "text.format.type is 'xml'", "text"),
    (
        response(tools=[FUNCTION | {"type": "function"}], tool_choice="required"),
        f"{IN_CALL}: x",
        "tools[0].parameters is not supported at #: x",
        "tools",
    ),
]


@pytest.mark.parametrize(("names", "text", "expected", "param"), CASES)
def test_a_field_has_the_clients_name(names: FieldNames, text: str, expected: str, param: str | None) -> None:
    error = error_body(BatonError(text), names)["error"]
    assert (error["message"], error["param"]) == (expected, param)


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 1, "min_tokens": 5}, {"ignore_eos": True, "structured_output": {"json": {}}}, {"logprobs": 99}],
)
@pytest.mark.parametrize("names", [completion(), chat(), response()])
def test_no_name_of_the_server_is_left(options: Any, names: FieldNames) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        params_from_options(options)
    text = names.text(refused.value)
    assert "sampling" not in text and "structured_output " not in text
