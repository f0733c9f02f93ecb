"""Constraints on a request's output: a JSON schema, a regular expression, a grammar or a list of texts.

Part of `baton.sampling_params`. `text.grammars` compiles them; the orchestrator checks whether they can be compiled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.errors import InvalidArgumentError
from baton.limits import MAX_FORM_BYTES, MAX_FORM_CHOICES

_FIELD = "sampling.structured_output"
_KINDS = ("json", "json_object", "regex", "grammar", "choice")
"""Fields of which one is set."""


@dataclass(frozen=True)
class StructuredOutput:
    """The form that a request's output must have. Exactly one field is set; raises InvalidArgumentError otherwise."""

    json: str | None = None
    """A JSON schema, as JSON: the output is a JSON value that it allows."""
    json_object: bool = False
    """True: the output is a JSON object of any form."""
    regex: str | None = None
    """A regular expression that matches the whole output. Without look-around and back references."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, or in GBNF, whose start symbol derives the output."""
    choice: tuple[str, ...] = ()
    """Texts, one of which is the output. At most 1,024."""
    compiled_bytes: int = field(default=0, compare=False)
    """Bytes of the compiled form, as measured by the orchestrator; 0: not known."""

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            known = ", ".join(_KINDS)
            raise InvalidArgumentError(f"{_FIELD} sets {' and '.join(given) or 'nothing'}: set one of {known}")
        check_choice_length(len(self.choice))
        value = getattr(self, given[0])
        texts: Sequence[str] = value if given[0] == "choice" else () if given[0] == "json_object" else (value,)
        if not all(texts):
            raise InvalidArgumentError(f"{_FIELD}.{given[0]} is empty: describe an output")
        num_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if num_bytes > MAX_FORM_BYTES:
            raise InvalidArgumentError(
                f"{_FIELD}.{given[0]} has {num_bytes} bytes: the limit is {MAX_FORM_BYTES}; shorten it"
            )

    @property
    def kind(self) -> str:
        """Return the name of the field that is set."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False, ()))


StructuredOption = StructuredOutput | Mapping[str, Any]
"""A StructuredOutput, or its fields as a mapping, whose schema may also be given as an object instead of JSON text."""


def structured_from_option(option: StructuredOption | None) -> StructuredOutput | None:
    """Return the value of the sampling option `structured_output`. Raises InvalidArgumentError for an unknown field
    and for a value of the wrong type."""
    if option is None or isinstance(option, StructuredOutput):
        return option
    values = {name: value for name, value in option.items() if value is not None}
    unknown = values.keys() - set(_KINDS)
    if unknown:
        known = ", ".join(_KINDS)
        raise InvalidArgumentError(f"{_FIELD}.{min(map(str, unknown))} is unknown: set one of {known}")
    schema = values.get("json")
    if schema is not None and not isinstance(schema, str):
        values["json"] = _as_json(schema)
    for name in ("regex", "grammar"):
        if not isinstance(values.get(name), str | None):
            raise InvalidArgumentError(f"{_FIELD}.{name} is {values[name]!r:.40}: use a string")
    if not isinstance(values.get("json_object", False), bool):
        raise InvalidArgumentError(f"{_FIELD}.json_object is {values['json_object']!r:.40}: use true, or leave it out")
    texts = values.get("choice", ())
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise InvalidArgumentError(f"{_FIELD}.choice is {texts!r:.40}: use a list of strings")
    return StructuredOutput(**{**values, "choice": tuple(texts)})


def check_choice_length(num_choices: int) -> None:
    """Raise InvalidArgumentError for a list of texts that is too long, before it is copied."""
    if num_choices > MAX_FORM_CHOICES:
        raise InvalidArgumentError(f"{_FIELD}.choice has {num_choices} entries: use at most {MAX_FORM_CHOICES}")


def _as_json(schema: object) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{_FIELD}.json is not valid JSON: {error}: send a JSON schema") from error
