"""What a client refuses to send, and what it sends."""

from typing import Any, get_type_hints

import pytest

from baton.calls.requests import PromptInput, call_metadata, check_deadline, make_request
from baton.errors import InvalidArgumentError
from baton.sampling_params import SamplingOptions, SamplingParams, params_from_options
from baton.v1 import orchestrator_pb2


def test_exactly_one_input_is_needed() -> None:
    with pytest.raises(InvalidArgumentError, match="input is missing"):
        PromptInput()
    with pytest.raises(InvalidArgumentError, match="input is prompt and token_ids"):
        PromptInput("Once", token_ids=[1])


def test_params_and_options_contradict() -> None:
    with pytest.raises(InvalidArgumentError, match="params and top_k contradict"):
        make_request(PromptInput("Once"), SamplingParams(), {"top_k": 3})


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (PromptInput("half \ud83d"), "prompt holds half a character at 5"),
        (PromptInput(messages=[{"role": "user"}]), r"messages\[0\] lacks, or does not know, content"),
        (PromptInput(messages=[{"role": "user", "content": "x", "name": "y"}]), "name"),
        (PromptInput(token_ids=[1, -1]), "token_ids: "),
        (PromptInput(token_ids=[2**32]), "token_ids: "),
        (PromptInput(b"x" * 17 * 2**20), "request is 178258.. bytes long, over the limit of 16777216"),
    ],
)
def test_what_the_message_cannot_carry_is_named(source: PromptInput, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        make_request(source, None, {})


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("temperature", -1.0, "sampling.temperature = -1.0"),
        ("max_tokens", 0, "sampling.max_tokens = 0"),
        ("max_tokens", 2**40, "sampling.max_tokens: .* use integers below"),
        ("stop_token_ids", [1, 2**32], "sampling.stop_token_ids: "),
        ("logit_bias", {2**32: 1.0}, "sampling.logit_bias: "),
        ("stop", "\ud83d", "sampling.stop: "),
    ],
)
def test_bad_sampling_is_named(option: str, value: Any, named: str) -> None:
    options: Any = {option: value}
    with pytest.raises(InvalidArgumentError, match=named):
        make_request(PromptInput("Once"), None, options)


def test_unknown_sampling_option_is_a_type_error() -> None:
    options: Any = {"temprature": 1.0}
    with pytest.raises(TypeError, match="temprature"):
        make_request(PromptInput("Once"), None, options)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf"), 5e6])
def test_bad_deadline_is_named(deadline_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match="deadline_s = "):
        check_deadline(deadline_s)


def test_bytes_are_sent_as_they_are() -> None:
    assert make_request(PromptInput(b"\xff"), None, {}).prompt == b"\xff"


def test_empty_input_is_the_servers_to_refuse() -> None:
    assert make_request(PromptInput(messages=[]), None, {}).WhichOneof("input") == "chat"
    assert make_request(PromptInput(token_ids=[]), None, {}).WhichOneof("input") == "token_ids"
    assert make_request(PromptInput(""), None, {}).WhichOneof("input") == "prompt"


def test_every_request_has_a_name_of_its_own() -> None:
    names = {make_request(PromptInput("Once"), None, {}).request_id for _ in range(3)}
    assert len(names) == 3 and "" not in names


def test_seed_counts_when_it_is_given() -> None:
    assert not make_request(PromptInput("Once"), None, {"temperature": 1.0}).seeded
    assert make_request(PromptInput("Once"), None, {"seed": 0}).seeded
    assert make_request(PromptInput("Once"), SamplingParams(), {}).seeded


def test_options_are_the_fields_of_the_params() -> None:
    assert list(get_type_hints(SamplingOptions)) == list(get_type_hints(SamplingParams))


def test_options_take_what_the_params_take() -> None:
    assert params_from_options({}) == SamplingParams()
    options: SamplingOptions = {"stop": "ab", "stop_token_ids": [1], "min_p": 0.5}
    assert params_from_options(options) == SamplingParams(stop=("ab",), stop_token_ids=(1,), min_p=0.5)
    assert params_from_options({"stop": ["a", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("interactive", orchestrator_pb2.PRIORITY_INTERACTIVE),
        ("standard", orchestrator_pb2.PRIORITY_STANDARD),
        ("batch", orchestrator_pb2.PRIORITY_BATCH),
    ],
)
def test_priority_is_sent_by_name(name: str, value: orchestrator_pb2.Priority.ValueType) -> None:
    assert make_request(PromptInput("Once"), None, {}, priority=name).priority == value


def test_exactness_is_asked_for_or_not() -> None:
    assert make_request(PromptInput("Once"), None, {}, fields=orchestrator_pb2.GenerateRequest(exact=True)).exact
    assert not make_request(PromptInput("Once"), None, {}).exact


def test_unknown_priority_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="priority = 'high' is unknown: use one of interactive, standard"):
        make_request(PromptInput("Once"), None, {}, priority="high")


def test_who_asks_goes_into_the_metadata() -> None:
    assert call_metadata(None, None) == ()
    assert call_metadata("k-1", "acme") == (("authorization", "Bearer k-1"), ("baton-tenant", "acme"))


@pytest.mark.parametrize("value", ["", "a\nb", "caf\u00e9"])
def test_what_metadata_cannot_carry_is_refused_and_not_shown(value: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        call_metadata(value, None)
    assert str(caught.value) == "api_key cannot be sent: use printable ASCII characters"
    with pytest.raises(InvalidArgumentError, match="tenant cannot be sent"):
        call_metadata(None, value)
