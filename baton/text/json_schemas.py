"""Converts JSON schemas to grammars for `baton.text.grammars`. Reports the location of unsupported keywords in a
schema.

A schema is rejected unless all of its keywords can be enforced. Every complete output for an accepted schema is
therefore valid. Between the tokens of a JSON value, an output may contain one space, or a line break and up to 40
spaces. This limit prevents a model from writing spaces forever.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

from llguidance import LLMatcher

from baton.errors import InvalidArgumentError

_WHITESPACE = r"( |\n {0,40})?"
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
"""Keywords whose value is a mapping from names to schemas. Keywords for definitions come first. A problem inside a
definition is therefore reported at the definition, and not where the definition is referenced."""
_LISTS = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
_SINGLES = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains")
_SAYS_NOTHING: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}
"""Keywords that cannot be enforced, each with the values that allow everything. A schema may use such a keyword only
with one of these values, with which the keyword has no effect."""
_LITERALS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
"""JSON Schema type that corresponds to each Python type of a literal."""
_NUMBERS = {"integer", "number"}
_Bound = tuple[float, int]
_LOCATING_S = 0.2
"""Maximum processor time in seconds for locating a problem in a schema. After this time, the best location that was
found so far is reported."""

Schema = dict[str, Any]


def schema_grammar(text: str) -> str:
    """Convert the text of a JSON schema to a grammar for llguidance. Raises InvalidArgumentError if the text is not a
    JSON schema. Also raises it for unsupported keywords; the error then contains their location as a JSON pointer."""
    schema = _parse(text)
    reason = _fault(schema)
    if reason:
        pointer, reason = _locate(schema, reason)
        raise InvalidArgumentError(
            f"sampling.structured_output.json is not supported at {pointer}: {reason}; write it otherwise, or leave it "
            "out"
        )
    return _grammar(schema)


def _parse(text: str) -> Schema:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"sampling.structured_output.json is not valid JSON: {error}: send a JSON schema"
        ) from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidArgumentError(
            f"sampling.structured_output.json is {schema!r:.40}: a schema that has answers is an object"
        )
    return schema


def _grammar(schema: Schema) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    if "/oneOf/" not in text:  # a reference into a list that `_simplified` would rename
        text = json.dumps(_simplified(schema), ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(
        text,
        overrides={"lenient": False, "coerce_one_of": False, "whitespace_pattern": _WHITESPACE},
    )


def _simplified(schema: Schema) -> Schema:
    """Return a schema that allows the same values, without keywords that allow everything. A `oneOf` whose alternatives
    exclude each other is replaced by an `anyOf`."""
    found: Schema = {}
    for name, value in schema.items():
        if value in _SAYS_NOTHING.get(name, ()):
            continue
        if name == "oneOf" and "anyOf" not in schema and isinstance(value, list) and _exclude_each_other(value):
            name = "anyOf"
        if isinstance(value, dict) and name in _MAPS:
            value = {key: _simplified(each) if _is_schema(each) else each for key, each in value.items()}
        elif isinstance(value, list) and name in _LISTS:
            value = [_simplified(each) if _is_schema(each) else each for each in value]
        elif name in _SINGLES and _is_schema(value):
            value = _simplified(value)
        found[name] = value
    return found


def _exclude_each_other(schemas: Sequence[object]) -> bool:
    """Return whether no value can satisfy two of the schemas, judging only by their constants, enumerations, types, and
    ranges of numbers."""
    values, types = list[tuple[str, object]](), list[str]()
    ranges, of_ranges = list[tuple[_Bound, _Bound]](), set[str]()
    for each in schemas:
        schema = each if isinstance(each, dict) else {}
        found = _values(schema)
        values += found
        allowed = set() if found else _types(schema)
        if allowed and allowed <= _NUMBERS:
            ranges.append(_range(schema))
            of_ranges |= allowed
        else:
            types += allowed
    types += of_ranges
    ranges.sort()
    if any(high >= low for (_, high), (low, _) in pairwise(ranges)):
        return False
    of_values = {type_ for type_, _ in values}
    return len(set(values)) == len(values) and len(set(types)) == len(types) and of_values.isdisjoint(types)


def _range(schema: Schema) -> tuple[_Bound, _Bound]:
    """Return the lower and the upper bound of the numbers that a schema allows. In each bound, the second number is 0
    if the bound itself is allowed. Two ranges are disjoint if the upper bound of one is less than the lower bound of
    the other."""

    def bound(name: str, default: float) -> float:
        return schema[name] if type(schema.get(name)) in (int, float) else default

    low = max((bound("minimum", -math.inf), 0), (bound("exclusiveMinimum", -math.inf), 1))
    return low, min((bound("maximum", math.inf), 0), (bound("exclusiveMaximum", math.inf), -1))


def _values(schema: Schema) -> set[tuple[str, object]]:
    """Return the values that a schema enumerates, each with its type; an empty set if one of them is not a literal."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(named, list) or not all(type(each) in _LITERALS for each in named):
        return set()
    return {(_type_of(each), each) for each in named}


def _types(schema: Schema) -> set[str]:
    """Return the types that a schema allows. A schema that lists no types allows all types."""
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    if not all(isinstance(each, str) for each in listed):
        return {*_LITERALS.values(), "array", "object"}
    return {*listed, *(["integer"] if "number" in listed else ())}


def _type_of(literal: object) -> str:
    """Return the JSON type of a literal. A number without a fraction is an integer."""
    return "integer" if isinstance(literal, float) and literal.is_integer() else _LITERALS[type(literal)]


def _fault(schema: Schema) -> str:
    """Return the reason, in one line, why a schema is not supported; empty if it is supported."""
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(_grammar(schema))
    except (ValueError, RecursionError) as error:
        return _one_line(str(error))
    return _one_line(messages[0]) if is_error else ""


def _locate(schema: Schema, reason: str) -> tuple[str, str]:
    """Return the JSON pointer of the smallest subschema that has the same fault as the whole schema, and the fault."""
    shared = {name: schema[name] for name in _MAPS[:2] if name in schema}
    pointer, part, end_s = "#", schema, time.thread_time() + _LOCATING_S
    while True:
        for place, child in _children(part):
            if time.thread_time() > end_s:
                return pointer, reason
            if _fault(shared | child) == reason and child is not part:
                pointer, part = f"{pointer}/{place}", child
                break
        else:
            return pointer, reason


def _children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the direct subschemas of a schema, each with its JSON pointer."""
    for name in _MAPS:
        children = schema.get(name)
        if isinstance(children, dict):
            yield from ((f"{name}/{_escaped(key)}", child) for key, child in children.items() if _is_schema(child))
    for name in _LISTS:
        children = schema.get(name)
        if isinstance(children, list):
            yield from ((f"{name}/{place}", child) for place, child in enumerate(children) if _is_schema(child))
    for name in _SINGLES:
        if _is_schema(child := schema.get(name)):
            yield name, child


def _is_schema(value: object) -> TypeGuard[Schema]:
    return isinstance(value, dict) and bool(value)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
