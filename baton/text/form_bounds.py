"""Limits of structured outputs that are checked before a form is compiled. A form is a JSON schema, a regular
expression or a grammar. Some short forms would need too much time or stack to compile."""

import json
import re
from collections.abc import Iterator
from typing import Any

from baton.errors import InvalidArgumentError
from baton.limits import MAX_MULTIPLE, MAX_REFERENCES, MAX_RULES
from baton.sampling_params import StructuredOutput

_RULE = re.compile(r"^[ \t]*[\w?!.<>-]{1,200}[ \t]*(?:\{[^}\n]{0,200}\}[ \t]*)?(?:::=|:)", re.MULTILINE)
_FIELD = "sampling.structured_output"


def check_bounds(form: StructuredOutput) -> None:
    """Raise InvalidArgumentError if the grammar or the JSON schema of a structured output exceeds a limit. The error
    message contains the limit."""
    if form.grammar is not None:
        num_rules = len(_RULE.findall(form.grammar))
        if num_rules > MAX_RULES:
            raise InvalidArgumentError(f"{_FIELD}.grammar has {num_rules} rules: use at most {MAX_RULES}")
    if form.json is not None:
        try:
            schema = json.loads(form.json)
        except (ValueError, RecursionError):
            return  # the compiler reports the error
        _check_schema(schema)


def _check_schema(schema: Any) -> None:
    targets = dict[str, list[str]]()
    """References in each definition, by the definition's pointer. References outside of definitions have the empty
    pointer."""
    for pointer, part in _parts(schema):
        multiple = part.get("multipleOf")
        if isinstance(multiple, int | float) and not -MAX_MULTIPLE <= multiple <= MAX_MULTIPLE:
            raise InvalidArgumentError(
                f"{_FIELD}.json: multipleOf = {multiple} is out of range: use at most {MAX_MULTIPLE}"
            )
        if isinstance(reference := part.get("$ref"), str):
            targets.setdefault(pointer, []).append(reference)
    if _longest(targets) > MAX_REFERENCES:
        raise InvalidArgumentError(
            f"{_FIELD}.json: more than {MAX_REFERENCES} references lead from one to the next: write them out"
        )


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all objects of a schema, each with the pointer of the definition that contains it. The pointer is empty for
    objects outside of definitions."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        pointer, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(pointer, each) for each in value]
        elif isinstance(value, dict):
            yield pointer, value
            for name, each in value.items():
                if name in ("$defs", "definitions") and not pointer and isinstance(each, dict):
                    waiting += [(f"#/{name}/{key}", inner) for key, inner in each.items()]
                else:
                    waiting.append((pointer, each))


def _longest(targets: dict[str, list[str]]) -> int:
    """Return the length of the longest chain of references. A circle of references counts once."""
    lengths, path = dict[str, int](), ["", *targets]
    entered = set[str]()
    while path:
        pointer = path[-1]
        nexts = [each for each in targets.get(pointer, ()) if each not in lengths and each not in entered]
        if pointer in lengths or (pointer in entered and not nexts):
            path.pop()
            lengths.setdefault(pointer, max((1 + lengths.get(each, 0) for each in targets.get(pointer, ())), default=0))
            continue
        entered.add(pointer)
        path += nexts
    return max(lengths.values(), default=0)
