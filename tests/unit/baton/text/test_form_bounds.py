"""Bounds on forms refuse what exceeds them, and nothing below."""

import json

import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_MULTIPLE, MAX_REFERENCES, MAX_RULES
from baton.sampling_params import StructuredOutput
from baton.text.form_bounds import check_bounds


def chain(length: int) -> StructuredOutput:
    """A schema with one reference to the first of so many definitions, each of which refers to the next in a circle."""
    definitions = {f"a{i}": {"items": {"$ref": f"#/$defs/a{(i + 1) % length}"}} for i in range(length)}
    return StructuredOutput(json=json.dumps({"$ref": "#/$defs/a0", "$defs": definitions}))


def rules(number: int, assigns: str) -> StructuredOutput:
    return StructuredOutput(grammar="".join(f'r{i} {assigns} "x: y" \n    | "z"\n' for i in range(number)))


def multiple(of: float) -> StructuredOutput:
    return StructuredOutput(json=json.dumps({"items": [{"anyOf": [{"multipleOf": of}]}]}))


@pytest.mark.parametrize(
    ("fits", "exceeds"),
    [
        (rules(MAX_RULES, ":"), rules(MAX_RULES + 1, ":")),
        (rules(MAX_RULES, "::="), rules(MAX_RULES + 1, "::=")),
        (multiple(MAX_MULTIPLE), multiple(MAX_MULTIPLE + 1)),
        (multiple(0.01), multiple(1e300)),
        (chain(MAX_REFERENCES - 1), chain(MAX_REFERENCES)),
    ],
    ids=["Lark", "GBNF", "multiple", "float", "references"],
)
def test_the_bound_is_the_last_that_fits(fits: StructuredOutput, exceeds: StructuredOutput) -> None:
    check_bounds(fits)
    with pytest.raises(InvalidArgumentError, match="sampling.structured_output"):
        check_bounds(exceeds)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "3"])
def test_what_is_no_schema_is_left_to_the_compiler(text: str) -> None:
    check_bounds(StructuredOutput(json=text))
