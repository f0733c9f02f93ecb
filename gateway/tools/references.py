"""Rewrites the references of a JSON schema that is embedded in another document. Pure."""

from typing import Any

from baton.errors import InvalidArgumentError

_LITERALS = ("const", "enum", "default", "examples")
"""Keywords whose values are literals, and not schemas."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas; the names are not keywords."""


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
