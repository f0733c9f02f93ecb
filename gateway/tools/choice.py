"""Which of a request's tools are offered to the model, and whether it must call one. Pure.

A model that must call is held to that by the form of its output: a JSON list of calls, whose arguments have the form of
the function's parameters, whatever its family writes by itself.
"""

from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidArgumentError
from baton.structured_output import StructuredOutput, structured_from_option
from gateway.bodies import NamedTool, Tool
from gateway.tools.references import rebased


def offered(tools: Sequence[Tool] | None, choice: str | NamedTool | None) -> tuple[Tool, ...]:
    """Return the tools that the model may call. Raises InvalidArgumentError for names that are there twice, and for a
    choice of what is not there."""
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
    """Return the form of an output that calls tools as it must: some of the offered ones, or the named one, once; None
    when it need not. Raises InvalidArgumentError for parameters that are too long."""
    if isinstance(choice, NamedTool):
        called, most_calls = [tool for tool in tools if tool.function.name == choice.function.name], 1
    elif choice == "required":
        called = list(tools)
    else:
        return None
    calls: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call(tool, place) for place, tool in enumerate(called)]},
    }
    if most_calls is not None:
        calls["maxItems"] = most_calls
    return structured_from_option({"json": calls})


def _call(tool: Tool, place: int) -> dict[str, Any]:
    """Return the JSON schema of a call, which is number `place` of the allowed ones."""
    parameters = tool.function.parameters or {"type": "object", "additionalProperties": False}
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": rebased(parameters, f"#/items/anyOf/{place}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
