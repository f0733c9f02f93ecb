import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import proto_types as clients
from baton.errors import InvalidArgumentError, VersionMismatchError
from baton.sampling_params import SamplingParams
from baton.transport import proto_types as convert
from baton.types import (
    DraftRound,
    FinishReason,
    Lease,
    LeaseRef,
    RequestId,
    SampledToken,
    SlotId,
    Stamp,
    TokenEvent,
    TokenLogprob,
    TokenRange,
)
from baton.v1 import common_pb2, generate_pb2

token_ids = st.integers(0, 2**32 - 1)
singles = st.floats(width=32, allow_nan=False)
sampled = st.builds(
    SampledToken,
    token_id=token_ids,
    logprob=st.none() | singles,
    top=st.lists(st.builds(TokenLogprob, token_ids, singles), max_size=3).map(tuple),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(5, 2**32 - 1),
    min_tokens=st.integers(0, 5),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    stop_token_ids=st.lists(token_ids, max_size=3, unique=True).map(tuple),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    num_drafts=st.none() | st.integers(0, 8),
)
events = st.builds(
    TokenEvent,
    index=token_ids,
    token=st.none() | sampled,
    text=st.text(),
    unix_ns=st.integers(0, 2**64 - 1),
    finish=st.none() | st.sampled_from(FinishReason),
    error=st.text(),
    drafts=st.none() | st.builds(DraftRound, st.text(), token_ids, token_ids, token_ids),
)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_range_round_trips(one: int, other: int) -> None:
    tokens = TokenRange(min(one, other), max(one, other))
    assert clients.range_from_proto(clients.range_to_proto(tokens)) == tokens


def test_reversed_range_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[5, 3\) is reversed"):
        clients.range_from_proto(common_pb2.TokenRange(start=5, end=3))


def test_lease_round_trips() -> None:
    ref = LeaseRef(SlotId(3), Stamp(2**64 - 1))
    lease = Lease(ref, RequestId("r"), 2, num_tokens=9, endpoint="127.0.0.1:1", ttl_s=0.1, num_present_tokens=4)
    assert convert.lease_from_proto(convert.lease_to_proto(lease)) == lease


def test_lease_of_no_slot_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"lease\.ref"):
        convert.lease_from_proto(common_pb2.Lease(num_tokens=3))


@settings(deadline=None)
@given(sampled)
def test_sampled_token_round_trips(token: SampledToken) -> None:
    assert clients.sampled_from_proto(clients.sampled_to_proto(token)) == token


@settings(deadline=None)
@given(params)
def test_sampling_params_round_trip(given_params: SamplingParams) -> None:
    assert clients.params_from_proto(clients.params_to_proto(given_params)) == given_params


def test_unset_optional_params_take_their_defaults() -> None:
    assert clients.params_from_proto(common_pb2.SamplingParams(max_tokens=4)) == SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (common_pb2.SamplingParams(), "max_tokens"),
        (common_pb2.SamplingParams(max_tokens=1, temperature=math.nan), "temperature"),
        (common_pb2.SamplingParams(max_tokens=1, top_p=0.0), "top_p"),
        (common_pb2.SamplingParams(max_tokens=1, logprobs=21), "logprobs"),
        (common_pb2.SamplingParams(max_tokens=1, logit_bias={1: math.inf}), "logit_bias"),
    ],
)
def test_bad_params_are_refused_by_name(message: common_pb2.SamplingParams, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        clients.params_from_proto(message)


@settings(deadline=None)
@given(st.lists(token_ids, max_size=5), st.lists(token_ids, max_size=5), params)
def test_history_round_trips(prompt: list[int], output: list[int], given_params: SamplingParams) -> None:
    history = convert.history_from_proto(convert.history_to_proto(prompt, output, given_params))
    assert history == (tuple(prompt), tuple(output), given_params)


@settings(deadline=None)
@given(events)
def test_event_round_trips(event: TokenEvent) -> None:
    assert clients.event_from_proto(clients.event_to_proto(event)) == event


@pytest.mark.parametrize("finish", [None, *FinishReason])
def test_finish_reason_round_trips(finish: FinishReason | None) -> None:
    assert clients.finish_from_proto(clients.finish_to_proto(finish)) is finish


def test_every_finish_reason_of_the_wire_is_known_here() -> None:
    known = {clients.finish_to_proto(finish) for finish in (None, *FinishReason)}
    assert known == set(generate_pb2.FinishReason.values())


def test_finish_reason_of_a_newer_version_is_refused() -> None:
    message = generate_pb2.TokenEvent()
    message.ParseFromString(b"\x28\x63")  # field 5, value 99
    with pytest.raises(VersionMismatchError, match="99"):
        clients.event_from_proto(message)
