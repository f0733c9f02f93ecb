"""The form of an output that must call tools: what it allows is read as calls, and nothing else is allowed."""

import json
from itertools import product
from typing import Any

import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_REFERENCES
from baton.sampling_params import StructuredOutput
from baton.text.form_bounds import check_bounds
from baton.text.grammars import Grammars
from gateway.bodies import ChatBody
from gateway.chat_answers import Gathered
from gateway.parsing.call_formats import OBLIGED
from gateway.parsing.output import OutputRules
from gateway.tools.choice import obliged_form
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


def form_of(parameters: list[dict[str, Any]]) -> StructuredOutput:
    """The form of calls of functions f0, f1 and so on with these parameters."""
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": each}}
        for number, each in enumerate(parameters)
    ]
    body = ChatBody.model_validate({"messages": [], "tools": tools, "tool_choice": "required"})
    form = obliged_form(body.tools or (), body.tool_choice)
    assert form is not None
    return form


def allowed(parameters: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Which values of "a" calls of functions with these parameters may have, of "x" and "y"."""
    grammar = Grammars(letter_tokenizer().to_json, (EOS_ID,)).compile(form_of(parameters))
    found = []
    for number, value in product(range(len(parameters)), "xy"):
        text = f'[{{"name": "f{number}", "arguments": {{"a": "{value}"}}}}]'
        if grammar.matcher().num_allowed([*ids_of(text), EOS_ID]) == len(text) + 1:
            found.append((number, value))
    return found


DRAFT_4, DRAFT_6, DRAFT_7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7))
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    ("reference", "definition", "more"),
    [
        ("#/$defs/A", {}, {}),
        *(("#/$defs/A", {}, {"$schema": draft}) for draft in (DRAFT_4, DRAFT_7, DRAFT_2020)),
        ("#/$defs/A", {}, {"$schema": DRAFT_7, "$id": "http://x/y.json"}),
        *(("#/$defs/A", {}, {"$id": own}) for own in ("urn:x", "y.json", "")),
        ("http://x/y.json#/$defs/A", {}, {"$id": "http://x/y.json"}),
        ("y.json#/$defs/A", {}, {"$id": "http://x/y.json"}),
        ("urn:a", {"$id": "urn:a"}, {}),
        *(("/b", {"$id": part}, {"$id": "http://e.com/a"}) for part in ("http://e.com/b", "//e.com/b", "/b", "b")),
        *((to, {"$id": "http://e.com/b"}, {"$id": "http://e.com/c/a"}) for to in ("../b", "//e.com/b", "/b")),
        *((to, {"$id": "//e.com/b"}, {"$id": "//e.com/a"}) for to in ("b", "/b", "//e.com/b")),
        *((to, {"$id": "/b"}, {"$id": "/a"}) for to in ("b", "/b", "/a#/$defs/A")),
        ("https://e.com/b", {"$id": "https://e.com/b"}, {"$id": "http://e.com/b"}),
        ("#A", {"$anchor": "A"}, {}),
    ],
)
def test_references_are_followed_also_where_two_functions_give_a_name_to_different_schemas(
    reference: str, definition: dict[str, Any], more: dict[str, Any]
) -> None:
    both = [
        {
            **more,
            "type": "object",
            "properties": {"a": {"$ref": reference}},
            "required": ["a"],
            "$defs": {"A": definition | {"enum": [value]}},
        }
        for value in "xy"
    ]
    assert allowed(both) == [(0, "x"), (1, "y")]
    assert allowed(both[:1]) == [(0, "x")]


def test_definitions_of_earlier_drafts_are_followed() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/definitions/A"}},
        "required": ["a"],
        "definitions": {"A": {"enum": ["y"]}},
    }
    assert allowed([schema]) == [(0, "y")]


@pytest.mark.parametrize("draft", [DRAFT_4, DRAFT_6, DRAFT_7, DRAFT_2020, None])
@pytest.mark.parametrize("more", [{}, {"allOf": [{}, {"$ref": "#/allOf/0"}]}])
def test_the_whole_may_be_a_reference(draft: str | None, more: dict[str, Any]) -> None:
    both = [
        {
            "$ref": "#/definitions/A",
            "definitions": {"A": {"type": "object", "properties": {"a": {"enum": [value]}}, "required": ["a"]}},
            **more,
            **({"$schema": draft} if draft else {}),
        }
        for value in "xy"
    ]
    assert allowed(both) == [(0, "x"), (1, "y")]


def test_a_reference_may_lead_to_a_property_or_to_the_whole() -> None:
    tree = {"properties": {"a": {"enum": ["x"]}, "next": {"$ref": "#"}}, "required": ["a"]}
    assert allowed([tree]) == [(0, "x")]
    twice = {"properties": {"b": {"enum": ["y"]}, "a": {"$ref": "#/properties/b"}}, "required": ["a"]}
    assert allowed([twice]) == [(0, "y")]


def test_what_looks_like_a_reference_in_a_value_or_a_name_stays() -> None:
    properties = {"$ref": {"type": "string"}, "$id": {"const": {"$ref": "urn:x"}}}
    (call,) = json.loads(form_of([{"properties": properties, "default": {"$id": "urn:x"}}]).json or "")["items"][
        "anyOf"
    ]
    arguments = call["properties"]["arguments"]
    assert (arguments["properties"], arguments["default"]) == (properties, {"$id": "urn:x"})


def test_a_chain_of_references_in_parameters_is_bounded_as_in_other_forms() -> None:
    definitions: dict[str, Any] = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(MAX_REFERENCES + 2)}
    chain = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions | {f"d{MAX_REFERENCES + 2}": {}}}
    with pytest.raises(InvalidArgumentError, match="references lead from one to the next"):
        check_bounds(form_of([{}, chain]))
