"""Reads the constraint on the form of the output from a request's body. The fields are OpenAI's `response_format`,
vLLM's `structured_outputs`, and the older names of the latter.

The server decides whether a schema or grammar is supported. The functions have no side effects.
"""

from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidArgumentError
from baton.sampling_params import StructuredOutput, structured_from_option
from gateway.bodies import SamplingBody

_GUIDED = ("json", "regex", "grammar", "choice")
"""Kinds of constraints that older versions of vLLM accept as fields: `guided_json`, `guided_regex`, `guided_grammar`
and `guided_choice`."""
_IGNORED = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
"""Options in vLLM's `structured_outputs` that are ignored. They configure a library, and do not change the permitted
output."""


def structured_of(body: SamplingBody) -> StructuredOutput | None:
    """Return the constraint on the form of the output; None if the body has none. Raises InvalidArgumentError for an
    invalid constraint, and for a body with more than one constraint."""
    given = {f"guided_{name}": {name: getattr(body, f"guided_{name}")} for name in _GUIDED}
    asked = {name: form for name, form in given.items() if None not in form.values()}
    if body.structured_outputs is not None:
        form = {name: value for name, value in body.structured_outputs.items() if value not in (None, False)}
        asked["structured_outputs"] = {name: value for name, value in form.items() if name not in _IGNORED}
    if (form_ := _response_form(body.response_format)) is not None:
        asked["response_format"] = form_
    if len(asked) > 1:
        raise InvalidArgumentError(f"{' and '.join(asked)} both constrain the output: send one of them")
    return structured_from_option(next(iter(asked.values()), None))


def form_names(body: SamplingBody) -> dict[str, str]:
    """Return a mapping for the translation of error messages. Its keys are the names that Baton's errors use for the
    constraint on the output. The value of each is the body's field that contains the constraint."""
    for name in (f"guided_{each}" for each in _GUIDED):
        if getattr(body, name) is not None:
            return {f"structured_output.{name.removeprefix('guided_')}": name, "structured_output": name}
    if body.structured_outputs is not None:
        return {"structured_output": "structured_outputs"}
    return {"structured_output.json": "response_format.json_schema.schema", "structured_output": "response_format"}


def _response_form(format_: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the form that a `response_format` requests, as fields of a StructuredOutput; None for plain text."""
    match (format_ or {"type": "text"}).get("type"):
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            assert format_ is not None
            named = format_.get("json_schema")
            if not isinstance(named, Mapping) or not isinstance(named.get("schema"), Mapping | bool):
                raise InvalidArgumentError("response_format.json_schema.schema is missing: send the JSON schema")
            return {"json": named["schema"]}
        case other:
            raise InvalidArgumentError(f"response_format.type is {other!r:.40}: use text, json_object or json_schema")
