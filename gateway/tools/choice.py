"""Selects the tools of a request that are offered to the model, and decides whether it must call one. Pure.

If the model must call a tool, its output is constrained to a JSON list of calls, whose arguments match the function's
parameters. This holds for all families, regardless of their usual format.
"""

from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidArgumentError
from baton.sampling_params import StructuredOutput, structured_from_option
from gateway.bodies import NamedTool, Tool

_LITERALS = ("const", "enum", "default", "examples")
"""Keywords whose values are literals, and not schemas."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas; the names are not keywords."""


def offered(tools: Sequence[Tool] | None, choice: str | NamedTool | None) -> tuple[Tool, ...]:
    """Return the tools that the model may call. Raises InvalidArgumentError for duplicate names, and for a choice that
    the tools do not contain."""
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
    """Return the form of an output that must call tools: any of the offered ones, or the named one exactly once. None
    when no call is required. Raises InvalidArgumentError for parameters that are too long."""
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
    """Return the request's field names for parts of the form of an output that must call tools, by the names that
    errors use for these parts. Empty when no call is required."""
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
    """Return a schema with its references into itself rewritten for its new place, `pointer`. A part with an `$id` is a
    document of its own and is left unchanged. Raises InvalidArgumentError for too deep nesting."""
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
