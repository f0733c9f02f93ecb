"""Fields of other servers that would change an answer are refused by name; those that only hint are ignored."""

from typing import Any

import pytest

from baton.errors import InvalidArgumentError
from gateway.bodies import ChatBody, CompletionBody, TokenizeBody
from gateway.fields.unsupported import UNSUPPORTED, refuse_unsupported
from gateway.responses.bodies import ResponsesBody

NOTHING: list[tuple[str, Any]] = [
    *((name, None) for name in UNSUPPORTED),
    ("suffix", ""),
    ("functions", []),
    ("use_beam_search", False),
    ("length_penalty", 1),
    ("length_penalty", 1.0),
    ("modalities", ["text"]),
    ("include_reasoning", True),
    ("skip_special_tokens", True),
    ("add_special_tokens", True),
    ("reasoning_effort", "low"),
    ("store", True),
    ("spaces_between_special_tokens", False),
]


@pytest.mark.parametrize(("name", "value"), NOTHING)
def test_what_asks_for_nothing_or_only_hints_is_taken(name: str, value: Any) -> None:
    body = CompletionBody.model_validate({"prompt": "Hi", name: value})
    refuse_unsupported(body, adds_special_tokens=True)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_would_change_the_answer_is_refused(name: str) -> None:
    body = ChatBody.model_validate({"messages": [], name: {"a": 1}})
    with pytest.raises(InvalidArgumentError, match=f"^{name} is not supported: .*; leave it out"):
        refuse_unsupported(body, adds_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("skip_special_tokens", False), ("add_special_tokens", True), ("modalities", ["audio"]), ("prompt_logprobs", 0)],
)
def test_values_that_are_no_defaults_are_refused(name: str, value: Any) -> None:
    body = TokenizeBody.model_validate({"messages": [], name: value})
    with pytest.raises(InvalidArgumentError, match=f"^{name} is not supported"):
        refuse_unsupported(body, adds_special_tokens=False)


def test_no_field_that_is_supported_is_among_them() -> None:
    known = {*ChatBody.model_fields, *ResponsesBody.model_fields, *CompletionBody.model_fields} - {"echo"}
    assert not known & UNSUPPORTED.keys()
