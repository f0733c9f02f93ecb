"""What of a body constrains its output, and what is refused with the field's name."""

import re
from typing import Any

import pytest

from baton.errors import InvalidArgumentError
from baton.sampling_params import StructuredOutput
from gateway.bodies import CompletionBody
from gateway.fields.names import completion_names
from gateway.fields.structured import structured_of


def form_of(**fields: Any) -> StructuredOutput | None:
    return structured_of(CompletionBody(prompt="Hi", **fields))


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            StructuredOutput(json='{"type": "null"}'),
        ),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}}, StructuredOutput(regex="a+")),
        ({"structured_outputs": {"regex": None, "json": {}}}, StructuredOutput(json="{}")),
        ({"guided_json": {"type": "null"}}, StructuredOutput(json='{"type": "null"}')),
        ({"guided_choice": ["a", "b"]}, StructuredOutput(choice=("a", "b"))),
        ({"guided_grammar": 'start: "a"'}, StructuredOutput(grammar='start: "a"')),
    ],
)
def test_a_form_is_read(fields: dict[str, Any], form: StructuredOutput | None) -> None:
    assert form_of(**fields) == form


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema is missing"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex and response_format both"),
        ({"structured_outputs": {}}, "^structured_outputs sets nothing: set one of json"),
        ({"structured_outputs": {"xml": "a"}}, "^structured_outputs.xml is unknown"),
        ({"structured_outputs": {"choice": "ab"}}, "^structured_outputs.choice is 'ab': use a list of strings"),
    ],
)
def test_what_is_wrong_is_refused(fields: dict[str, Any], reason: str) -> None:
    body = CompletionBody(prompt="Hi", **fields)
    with pytest.raises(InvalidArgumentError) as refused:
        structured_of(body)
    assert re.search(reason, completion_names(body).text(refused.value))
