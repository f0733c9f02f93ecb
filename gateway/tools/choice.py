"""Selects the tools of a request that are offered to the model, and decides whether the model must call one.

If the model must call a tool, its output is constrained to a JSON list of calls. The arguments of each call match the
JSON schema of the function's parameters. This applies to all model families, although they usually write calls in other
formats. The function's schema gets a base URI, because the schema becomes a part of another one.
"""

import re
from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidArgumentError
from baton.sampling_params import StructuredOutput, structured_from_option
from gateway.bodies import NamedTool, Tool

_ARGUMENTS = "/properties/arguments"
_LITERALS = ("const", "enum", "default", "examples")
"""JSON schema keywords whose values are literals and not schemas."""
_ABSOLUTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:(?!//json-schema\.org/)")
"""Beginning of an absolute URI. The compiler knows the schemas of json-schema.org."""
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
        f"structured_output.json is not supported at {at}": f"tools[{number}].function.parameters is not supported at #"
        for place, number in enumerate(called)
        for at in (_place(place), _place(place).removesuffix(_ARGUMENTS))
    }
    return places | {"structured_output.json": "tools", "structured_output": "tools"} if called else {}


def _called(tools: Sequence[Tool], choice: str | NamedTool | None) -> list[int]:
    """Return the indices of the tools of which at least one must be called."""
    name = choice.function.name if isinstance(choice, NamedTool) else None
    return [n for n, tool in enumerate(tools) if choice == "required" or tool.function.name == name]


def _place(place: int) -> str:
    """Return where in the form the arguments of a call are, which is number `place` of the allowed ones."""
    return f"#/items/anyOf/{place}{_ARGUMENTS}"


def _call(tool: Tool, place: int) -> dict[str, Any]:
    """Return the JSON schema of a call, which is number `place` of the allowed ones."""
    parameters = tool.function.parameters or {"type": "object", "additionalProperties": False}
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": _document(parameters, place),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _document(parameters: dict[str, Any], place: int) -> dict[str, Any]:
    """Return a copy of a function's parameters as a JSON schema document of its own within the form. References within
    the parameters keep their meaning, because they are relative to the document's `$id`, whose scheme contains
    `place`."""
    scheme = f"tool{place}+"
    try:
        made = _renamed(parameters, scheme)
    except RecursionError as error:
        raise InvalidArgumentError("tools: the parameters of a function are nested too deeply: flatten them") from error
    uri = str(made.get("$id", ""))
    if not uri.startswith(scheme):
        uri = f"{scheme}http:{uri}" if uri.startswith("//") else f"{scheme}http://parameters/{uri.lstrip('/')}"
    of_draft_4 = {"id": uri} if "draft-04/" in str(made.get("$schema")) else {}
    parts = made.get("allOf", [])
    if "$ref" in made and isinstance(parts, list):  # drafts 4 to 7 ignore an $id next to a $ref
        made["allOf"] = [*parts, {"$ref": made.pop("$ref")}]
    return {**made, "$id": uri, **of_draft_4}


def _renamed(schema: Any, scheme: str) -> Any:
    """Return a copy of a JSON schema in which absolute URIs of its parts begin with `scheme`, so that relative ones
    still resolve against them. Other functions may give the same URIs to other schemas."""
    if isinstance(schema, list):
        return [_renamed(each, scheme) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict[str, Any]()
    for name, value in schema.items():
        if name in ("$id", "$ref") and isinstance(value, str) and _ABSOLUTE.match(value):
            found[name] = scheme + value
        elif name in _LITERALS:
            found[name] = value
        elif name in _NAMED and isinstance(value, dict):
            found[name] = {key: _renamed(each, scheme) for key, each in value.items()}
        else:
            found[name] = _renamed(value, scheme)
    return found
