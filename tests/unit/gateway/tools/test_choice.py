"""The form of an output that must call tools: what it allows is read as calls, and nothing else is allowed."""

from typing import Any

import pytest

from baton.text.grammars import Grammars
from gateway.bodies import ChatBody
from gateway.chat_answers import Gathered
from gateway.parsing.call_formats import OBLIGED
from gateway.parsing.output import OutputRules
from gateway.tools.choice import obliged_form, rebased
from tests.support.models.tiny_tokenizer import EOS_ID, ids_of, letter_tokenizer

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}},
    {"type": "function", "function": {"name": "time"}},
]
WEATHER = '{"name": "weather", "arguments": {"city": "Rome"}}'
TIME = '{"name": "time", "arguments": {}}'
NAMED = {"type": "function", "function": {"name": "time"}}


def num_allowed(text: str, choice: Any, most_calls: int | None) -> int:
    """Characters of a text that an engine lets through, its end included."""
    body = ChatBody.model_validate({"messages": [], "tools": TOOLS, "tool_choice": choice})
    form = obliged_form(body.tools or (), body.tool_choice, most_calls=most_calls)
    assert form is not None
    matcher = Grammars(letter_tokenizer().to_json, (EOS_ID,)).compile(form).matcher()
    return matcher.num_allowed([*ids_of(text), EOS_ID])


@pytest.mark.parametrize(
    ("choice", "most_calls", "text", "calls"),
    [
        ("required", None, f"[{WEATHER}]", [("weather", '{"city": "Rome"}')]),
        ("required", None, f"[{TIME}, {WEATHER}]", [("time", "{}"), ("weather", '{"city": "Rome"}')]),
        ("required", 1, f"[{TIME}]", [("time", "{}")]),
        (NAMED, None, f"[{TIME}]", [("time", "{}")]),
    ],
)
def test_what_is_allowed_is_read_as_calls(
    choice: Any, most_calls: int | None, text: str, calls: list[tuple[str, str]]
) -> None:
    assert num_allowed(text, choice, most_calls) == len(text) + 1
    parser, gathered = OutputRules(OBLIGED, frozenset({"weather", "time"}), most_calls).parser(), Gathered()
    for letter in text:
        for piece in parser.push(letter):
            gathered.add(piece)
    for piece in parser.end():
        gathered.add(piece)
    assert [(call.name, call.arguments) for call in gathered.calls] == calls and not gathered.text


@pytest.mark.parametrize(
    ("choice", "most_calls", "text"),
    [
        ("required", None, "[]"),
        ("required", None, '[{"name": "other"'),
        ("required", None, '[{"name": "weather", "arguments": {"city": "Oslo"'),
        ("required", 1, f"[{TIME}, {WEATHER}]"),
        (NAMED, None, f"[{WEATHER}]"),
        (NAMED, None, f"[{TIME}, {TIME}]"),
    ],
)
def test_all_else_is_not_allowed(choice: Any, most_calls: int | None, text: str) -> None:
    assert num_allowed(text, choice, most_calls) < len(text)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_choice_that_obliges_to_nothing_has_no_form(choice: Any) -> None:
    body = ChatBody.model_validate({"messages": [], "tools": TOOLS, "tool_choice": choice})
    assert obliged_form(body.tools or (), body.tool_choice) is None


def choosing(parameters: list[dict[str, Any]], text: str) -> int:
    """Characters of a call of the last of some functions with these parameters that are let through, with its end."""
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": each}}
        for number, each in enumerate(parameters)
    ]
    body = ChatBody.model_validate({"messages": [], "tools": tools, "tool_choice": "required"})
    form = obliged_form(body.tools or (), body.tool_choice)
    assert form is not None
    matcher = Grammars(letter_tokenizer().to_json, (EOS_ID,)).compile(form).matcher()
    return matcher.num_allowed(ids_of(f'[{{"name": "f{len(parameters) - 1}", "arguments": {text}}}]'))


def with_definition(keyword: str, values: list[str]) -> dict[str, Any]:
    reference = {"$ref": f"#/{keyword}/A"}
    definitions = {keyword: {"A": {"enum": values}}}
    return {
        "type": "object",
        "properties": {"a": reference},
        "required": ["a"],
        "additionalProperties": False,
        **definitions,
    }


@pytest.mark.parametrize("keyword", ["$defs", "definitions"])
def test_references_within_parameters_are_followed_also_where_two_functions_define_a_name(keyword: str) -> None:
    both = [with_definition(keyword, ["x"]), with_definition(keyword, ["y"])]
    whole = len('[{"name": "f1", "arguments": {"a": "y"}}]')
    assert choosing(both, '{"a": "y"}') == whole
    assert choosing(both, '{"a": "x"}') < whole


def test_a_reference_may_lead_to_a_property_or_to_the_whole() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    text = '{"next": {"next": {}}}'
    assert choosing([tree], text) == len(f'[{{"name": "f0", "arguments": {text}}}]')
    twice = {
        "type": "object",
        "properties": {"b": {"enum": ["z"]}, "$ref": {"$ref": "#/properties/b"}},
        "required": ["b", "$ref"],
        "additionalProperties": False,
    }
    text = '{"b": "z", "$ref": "z"}'
    assert choosing([twice], text) == len(f'[{{"name": "f0", "arguments": {text}}}]')


def test_what_looks_like_a_reference_in_a_value_stays() -> None:
    schema = {"const": {"$ref": "#/x"}, "default": {"$ref": "#"}}
    assert rebased(schema, "#/y") == schema
    own = {"$id": "urn:x", "properties": {"a": {"$ref": "#/$defs/A"}}}
    assert rebased({"anyOf": [own, {"$ref": "#/b"}]}, "#/y") == {"anyOf": [own, {"$ref": "#/y/b"}]}
