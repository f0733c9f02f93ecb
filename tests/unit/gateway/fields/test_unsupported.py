"""Fields of other servers that would change an answer are refused by name; those that only hint are ignored."""

from typing import Any

import pytest
from pydantic import BaseModel

from baton.errors import InvalidArgumentError
from gateway.bodies import ChatBody, CompletionBody, SamplingBody, TokenizeBody
from gateway.errors import UnsupportedFieldError, error_body
from gateway.fields.unsupported import REFUSED, refuse_unsupported
from gateway.responses.bodies import ResponsesBody
from gateway.responses.reading import response_names

NOTHING: list[tuple[str, Any]] = [
    *((name, None) for name in sorted(REFUSED - CompletionBody.model_fields.keys())),
    ("suffix", ""),
    ("functions", []),
    ("use_beam_search", False),
    ("length_penalty", 1),
    ("length_penalty", 1.0),
    ("modalities", ["text"]),
    ("include_reasoning", True),
    ("skip_special_tokens", True),
    ("add_special_tokens", True),
    *(("n_predict", -1), ("repeat_penalty", 1), ("repeat_penalty", 1.0), ("typical_p", 1.0)),
    *(("mirostat", 0), ("mirostat", False)),
    *(("tools", []), ("tool_choice", "auto"), ("tool_choice", "none"), ("truncation", "disabled"), ("do_sample", True)),
    ("reasoning_effort", "low"),
    ("store", True),
    ("spaces_between_special_tokens", False),
]


@pytest.mark.parametrize(("name", "value"), NOTHING)
def test_what_asks_for_nothing_or_only_hints_is_taken(name: str, value: Any) -> None:
    body = CompletionBody.model_validate({"prompt": "Hi", name: value})
    assert name in (body.model_extra or {}), "no field of the path reads it"
    refuse_unsupported(body, adds_special_tokens=True)


@pytest.mark.parametrize("value", [0, False])
def test_logprobs_of_no_tokens_change_no_response(value: object) -> None:
    body = ResponsesBody.model_validate({"input": "Hi", "logprobs": value})
    assert "logprobs" in (body.model_extra or {}), "no field of the path reads it"
    refuse_unsupported(body, adds_special_tokens=False)


@pytest.mark.parametrize("name", sorted(REFUSED - ChatBody.model_fields.keys()))
def test_what_would_change_the_answer_is_refused(name: str) -> None:
    body = ChatBody.model_validate({"messages": [], name: {"a": 1}})
    with pytest.raises(InvalidArgumentError, match=f"^{name} is not supported: .*; leave it out"):
        refuse_unsupported(body, adds_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("skip_special_tokens", False), ("add_special_tokens", True), ("modalities", ["audio"])),
        *(("prompt_logprobs", 0), ("mirostat", True), ("do_sample", False), ("do_sample", 1)),
    ],
)
def test_values_that_are_no_defaults_are_refused(name: str, value: Any) -> None:
    body = TokenizeBody.model_validate({"messages": [], name: value})
    with pytest.raises(InvalidArgumentError, match=f"^{name} is not supported"):
        refuse_unsupported(body, adds_special_tokens=False)


REQUIRED: dict[type[BaseModel], dict[str, Any]] = {
    ChatBody: {"messages": []},
    CompletionBody: {"prompt": "Hi"},
    ResponsesBody: {"input": "Hi"},
    TokenizeBody: {},
}
HINTS = {"metadata", "reasoning", "store"}
IGNORED: dict[type[BaseModel], set[str]] = {
    ChatBody: HINTS,
    CompletionBody: HINTS | {"chat_template_kwargs", "parallel_tool_calls"},
    ResponsesBody: set(),
    TokenizeBody: {
        *SamplingBody.model_fields,
        *(
            name
            for name in (*ChatBody.model_fields, *ResponsesBody.model_fields)
            if "max_" in name or "logprobs" in name
        ),
        *HINTS,
        *("include", "parallel_tool_calls", "text"),
    },
}
"""Fields of other paths that do not change the meaning of a body: for example, what forms an output has no effect on
the tokens of a prompt."""


@pytest.mark.parametrize("kind", REQUIRED, ids=lambda each: each.__name__)
def test_a_field_of_another_path_is_known_or_refused_or_changes_nothing(kind: type[BaseModel]) -> None:
    others = {name for other in REQUIRED for name in other.model_fields} - kind.model_fields.keys()
    for name in sorted(others - IGNORED[kind]):
        body = kind.model_validate(REQUIRED[kind] | {name: {"a": 1}})
        with pytest.raises(UnsupportedFieldError, match=f"^{name} is not supported: .*; leave it out"):
            refuse_unsupported(body, adds_special_tokens=False)


@pytest.mark.parametrize(
    ("kind", "name", "value", "instead"),
    [
        (ResponsesBody, "max_tokens", 5, "max_output_tokens"),
        (ResponsesBody, "max_completion_tokens", 5, "max_output_tokens"),
        (ResponsesBody, "logprobs", True, "include"),
        (ResponsesBody, "logprobs", 1, "include"),
        (ResponsesBody, "prompt", {"id": "pmpt_1", "variables": {}}, "instructions and input"),
        (ResponsesBody, "messages", [{"role": "user", "content": "a"}], "input"),
        (CompletionBody, "max_completion_tokens", 5, "max_tokens"),
        (CompletionBody, "max_output_tokens", 5, "max_tokens"),
        (CompletionBody, "top_logprobs", 5, "logprobs"),
        (CompletionBody, "tools", [{"type": "function"}], "/v1/chat/completions"),
        (CompletionBody, "tool_choice", "required", "/v1/chat/completions"),
        (ChatBody, "max_output_tokens", 5, "max_completion_tokens"),
        (ChatBody, "max_new_tokens", 5, "max_completion_tokens"),
        (ChatBody, "n_predict", 5, "max_completion_tokens"),
        (ChatBody, "repeat_penalty", 1.1, "repetition_penalty"),
        (ChatBody, "typical_p", 0.9, "top_p"),
        (ChatBody, "mirostat", 2, "temperature and top_p"),
        (ChatBody, "text", {"format": {"type": "json_schema"}}, "response_format"),
        (TokenizeBody, "input", "Hi", "messages"),
    ],
)
def test_a_refusal_names_the_field_to_use(kind: type[BaseModel], name: str, value: Any, instead: str) -> None:
    body = kind.model_validate(REQUIRED[kind] | {name: value})
    with pytest.raises(UnsupportedFieldError, match=f"^{name} is not supported: use {instead};"):
        refuse_unsupported(body, adds_special_tokens=False)
    if kind is ResponsesBody:
        names = response_names(ResponsesBody.model_validate(REQUIRED[kind]))
        error = error_body(UnsupportedFieldError(f"{name} is not supported"), names)["error"]
        assert (error["message"], error["param"]) == (f"{name} is not supported", name)
