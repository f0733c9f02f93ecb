"""A form is one of five, checked where it enters, and survives the wire."""

from typing import Any

import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_FORM_BYTES, MAX_FORM_CHOICES
from baton.proto_types import params_from_proto, params_to_proto
from baton.sampling_params import SamplingParams, StructuredOutput, params_from_options
from baton.v1 import common_pb2

FORMS = [
    StructuredOutput(json='{"type": "null"}'),
    StructuredOutput(json_object=True),
    StructuredOutput(regex="a+"),
    StructuredOutput(grammar='start: "a"'),
    StructuredOutput(choice=("yes", "no")),
]


@pytest.mark.parametrize("form", [None, *FORMS])
def test_a_form_survives_the_wire(form: StructuredOutput | None) -> None:
    params = SamplingParams(structured_output=form)
    assert params_from_proto(params_to_proto(params)) == params


@pytest.mark.parametrize("form", FORMS)
def test_the_kind_is_the_field_that_is_set(form: StructuredOutput) -> None:
    assert getattr(form, form.kind)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "sets nothing: set one of json, json_object, regex, grammar, choice"),
        ({"json": "{}", "regex": "a"}, "sets json and regex"),
        ({"regex": ""}, "regex is empty"),
        ({"choice": ("a", "")}, "choice is empty"),
        ({"regex": "a" * (MAX_FORM_BYTES + 1)}, f"the limit is {MAX_FORM_BYTES}"),
        ({"choice": ("a",) * (MAX_FORM_CHOICES + 1)}, f"use at most {MAX_FORM_CHOICES}"),
    ],
)
def test_a_form_out_of_its_limits_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"sampling.structured_output.*{reason}"):
        StructuredOutput(**fields)


def test_a_message_without_a_form_or_with_too_many_texts_is_refused() -> None:
    empty = common_pb2.SamplingParams(max_tokens=1, structured_output=common_pb2.StructuredOutput())
    with pytest.raises(InvalidArgumentError, match="sets nothing"):
        params_from_proto(empty)
    long = common_pb2.TextChoice(texts=["a"] * (MAX_FORM_CHOICES + 1))
    many = common_pb2.SamplingParams(max_tokens=1, structured_output=common_pb2.StructuredOutput(choice=long))
    with pytest.raises(InvalidArgumentError, match="1025 entries"):
        params_from_proto(many)


@pytest.mark.parametrize(
    ("option", "form"),
    [
        (FORMS[0], FORMS[0]),
        (None, None),
        ({"json": {"type": "null"}}, FORMS[0]),
        ({"json": '{"type": "null"}'}, FORMS[0]),
        ({"json": True}, StructuredOutput(json="true")),
        ({"json_object": True}, FORMS[1]),
        ({"choice": ["yes", "no"]}, FORMS[4]),
    ],
)
def test_clients_give_a_form_or_its_fields(option: Any, form: StructuredOutput | None) -> None:
    assert params_from_options({"structured_output": option}).structured_output == form


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"xml": "a"}, "xml is unknown: set one of"),
        ({"regex": 5}, "regex is 5: use a string"),
        ({"json": {1, 2}}, "json is not valid JSON"),
        ({"json_object": "yes"}, "json_object is 'yes'"),
        ({"choice": "yes"}, "choice is 'yes': use a list of strings"),
        ({"choice": [1]}, r"choice is \[1\]: use a list of strings"),
    ],
)
def test_a_wrong_option_is_refused(option: Any, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        params_from_options({"structured_output": option})


@pytest.mark.parametrize("fields", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_what_moves_the_end_contradicts_a_form(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"sampling.{min(fields)} = .* leave {min(fields)} out"):
        SamplingParams(structured_output=FORMS[0], **fields)
