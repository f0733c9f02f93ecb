"""Schemas that say the same with words that are followed, and with words that are not. Faults: test_grammars.py."""

import json
from typing import Any

import pytest

from baton.errors import InvalidArgumentError
from baton.text.json_schemas import schema_grammar

KEYED = {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}

RANGES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 6, "maximum": 9},
    {"type": "number", "exclusiveMaximum": 5, "minimum": 2.5},
    {"type": "integer", "minimum": 5, "exclusiveMaximum": 6},
    {"type": "number", "exclusiveMinimum": 9},
    {"type": ["string", "null"]},
]


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"items": {"not": False, "propertyNames": True, "dependentRequired": {}}}, {"items": {}}),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, {"anyOf": [{"const": 1}, {"const": 2}]}),
        ({"oneOf": [{"const": 1}, {"enum": [2.5, "a"]}]}, {"anyOf": [{"const": 1}, {"enum": [2.5, "a"]}]}),
        ({"oneOf": [{"type": "integer"}, {"const": 1.5}]}, {"anyOf": [{"type": "integer"}, {"const": 1.5}]}),
        ({"oneOf": RANGES}, {"anyOf": RANGES}),
        ({"oneOf": [{"const": True}, {"const": 1}]}, {"anyOf": [{"const": True}, {"const": 1}]}),
        (
            {"properties": {"a": {"oneOf": [KEYED, {"type": ["null", "number"]}]}}},
            {"properties": {"a": {"anyOf": [KEYED, {"type": ["null", "number"]}]}}},
        ),
    ],
)
def test_words_that_say_nothing_change_nothing(schema: dict[str, Any], same: dict[str, Any]) -> None:
    assert json.loads(schema_grammar(json.dumps(schema))) == json.loads(schema_grammar(json.dumps(same)))


def test_properties_may_have_the_names_of_keywords() -> None:
    schema = {"properties": {"not": False, "oneOf": {"const": 1}, "uniqueItems": False}}
    assert (
        json.loads(schema_grammar(json.dumps(schema)))["grammars"][0]["json_schema"]["properties"]
        == schema["properties"]
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"oneOf": [{"const": 1}, {"type": "number"}]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"const": [1]}, {"const": [1.0]}]},
        {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "number", "minimum": 5}]},
        {"oneOf": [{"type": "integer", "exclusiveMaximum": 5}, {"type": "integer", "minimum": 4}]},
        {"oneOf": [{"type": "integer", "maximum": 5}, {"type": ["integer", "null"], "minimum": 6}]},
        {"oneOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "integer", "minimum": 3, "maximum": 4}]},
        {"oneOf": [{"maximum": 5}, {"minimum": 6}]},
        {"oneOf": [{"type": "integer", "maximum": 5}, {"const": 7}]},
        {"oneOf": [{"const": 1}, {"const": 2}, {}]},
        {"oneOf": [{"const": 1}, {"const": 2}, True]},
        {"oneOf": [{"const": 1}, {"const": 2}], "anyOf": [{"const": 1}]},
        {"oneOf": [{"const": 1}, {"const": 2}], "items": {"$ref": "#/oneOf/0"}},
        {"uniqueItems": True},
    ],
)
def test_what_might_say_something_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="is not supported at #"):
        schema_grammar(json.dumps(schema))
