"""Selects the tools of a request that are offered to the model, and decides whether the model must call one.

If the model must call a tool, its output is constrained to a JSON list of calls. The arguments of each call match the
JSON schema of the function's parameters. This applies to all model families, although they usually write calls in other
formats. References in the function's schema are rewritten, because the schema becomes a part of another one.
"""

from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidArgumentError
from baton.sampling_params import StructuredOutput, structured_from_option
from gateway.bodies import NamedTool, Tool

_LITERALS = ("const", "enum", "default", "examples")
"""JSON schema keywords whose values are literals and not schemas."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""JSON schema keywords whose values map arbitrary names to schemas. The names are not keywords."""


def offered(tools: Sequence[Tool] | None, choice: str | NamedTool | None) -> tuple[Tool, ...]:
    """Return the tools that the model may call. `choice` is the field `tool_choice` of the request. Raises
    InvalidArgumentError for duplicate names, and for a choice that names a tool which is not in `tools`."""
    given = tuple(tools or ())
    names = [tool.function.name for tool in given]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(f"tools holds {name!r} more than once: give each function a name of its own")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidArgumentError(f"tool_choice names {choice.function.name!r:.80}: use one of the tools")
    if choice == "required" and not given:
        raise InvalidArgumentError("tool_choice = 'required' needs tools: give some, or leave it out")
    return () if choice == "none" else given


def obliged_form(
    tools: Sequence[Tool], choice: str | NamedTool | None, *, most_calls: int | None = None
) -> StructuredOutput | None:
    """Return the constraint for an output that must call tools. If `choice` names a tool, the output must be exactly
    one call of this tool. If `choice` is "required", the output must have at least one call of any of the tools, and at
    most `most_calls` calls. Return None when no call is required. Raises InvalidArgumentError if the schemas of the
    parameters are too long."""
    called = _called(tools, choice)
    if not called:
        return None
    if isinstance(choice, NamedTool):
        most_calls = 1
    calls: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call(tools[number], place) for place, number in enumerate(called)]},
    }
    if most_calls is not None:
        calls["maxItems"] = most_calls
    return structured_from_option({"json": calls})


def parameter_names(tools: Sequence[Tool], choice: str | NamedTool | None) -> dict[str, str]:
    """Return a mapping for the translation of error messages about required tool calls. A key is a field's name, or the
    beginning of an error's text, as Baton writes it. The value replaces it, and has the name of the field in the
    client's request. Empty when no call is required."""
    called = _called(tools, choice)
    places = {
        f"structured_output.json is not supported at {_place(place)}": f"tools[{number}].function.parameters is not "
        "supported at #"
        for place, number in enumerate(called)
    }
    return places | {"structured_output.json": "tools", "structured_output": "tools"} if called else {}


def _called(tools: Sequence[Tool], choice: str | NamedTool | None) -> list[int]:
    """Return the indices of the tools of which at least one must be called."""
    name = choice.function.name if isinstance(choice, NamedTool) else None
    return [n for n, tool in enumerate(tools) if choice == "required" or tool.function.name == name]


def _place(place: int) -> str:
    """Return where in the form the arguments of a call are, which is number `place` of the allowed ones."""
    return f"#/items/anyOf/{place}/properties/arguments"


def _call(tool: Tool, place: int) -> dict[str, Any]:
    """Return the JSON schema of a call, which is number `place` of the allowed ones."""
    parameters = tool.function.parameters or {"type": "object", "additionalProperties": False}
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": rebased(parameters, _place(place)),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def rebased(schema: Any, pointer: str) -> Any:
    """Return a copy of a JSON schema for use inside another document. References within the schema are rewritten.
    `pointer` is the JSON pointer of the schema in the other document. A part with an `$id` counts as a document of its
    own, and is not changed. Raises InvalidArgumentError if the schema is nested too deeply."""
    try:
        return _rebased(schema, pointer)
    except RecursionError as error:
        raise InvalidArgumentError("tools: the parameters of a function are nested too deeply: flatten them") from error


def _rebased(schema: Any, pointer: str) -> Any:
    if isinstance(schema, list):
        return [_rebased(each, pointer) for each in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    found = dict[str, Any]()
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[name] = pointer + value[1:]
        elif name in _LITERALS:
            found[name] = value
        elif name in _NAMED and isinstance(value, dict):
            found[name] = {key: _rebased(each, pointer) for key, each in value.items()}
        else:
            found[name] = _rebased(value, pointer)
    return found
