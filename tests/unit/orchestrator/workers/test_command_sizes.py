"""Whatever a client may ask for, what the orchestrator tells a generation group of it fits into one message."""

from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError
from baton.limits import MAX_LOGIT_BIASES, MAX_MESSAGE_BYTES, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from baton.results.completion import ModelInfo
from baton.types import Lease, LeaseRef, RequestId, SlotId, Stamp, StreamNumber
from baton.v1 import common_pb2, generate_pb2
from baton.v1 import orchestrator_pb2 as pb
from orchestrator.api.checks import RequestValidator
from orchestrator.api.request_reader import RequestReader
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.workers.messages import stream_request, takeover_request
from orchestrator.workers.streams import MAX_COMMAND_BYTES
from tests.support.models.tiny_tokenizer import letter_tokenizer

MODEL = ModelInfo("m", 8192, 2**18, "float32", False, "f")
READER = RequestReader(RequestValidator(letter_tokenizer(), MODEL, ()))
NUMBER = StreamNumber(2**64 - 1)
LEASE = Lease(LeaseRef(SlotId(2**32 - 1), Stamp(2**64 - 1)), RequestId("r"), 1, 1, "h:1", 1.0)
CONFIG = OrchestratorConfig()
LARGEST_ID = MODEL.vocab_size - 1


def around(limit: int) -> st.SearchStrategy[int]:
    """A length near 0 or near the limit, on both sides."""
    return st.one_of(st.integers(0, 3), st.integers(limit - 1, limit + 1))


def sampling(lengths: tuple[int, int, int, int], char: str, max_tokens: int, n: int) -> common_pb2.SamplingParams:
    num_stops, num_chars, num_ids, num_biases = lengths
    return common_pb2.SamplingParams(
        max_tokens=max_tokens,
        stop=[char * num_chars] * num_stops,
        stop_token_ids=range(LARGEST_ID - num_ids, LARGEST_ID),
        logit_bias=dict.fromkeys(range(LARGEST_ID - num_biases, LARGEST_ID), -99.5),
        seed=2**64 - 1,
        n=n,
    )


params = st.builds(
    sampling,
    st.tuples(around(MAX_STOP_STRINGS), around(MAX_STOP_CHARS), around(MAX_STOP_TOKEN_IDS), around(MAX_LOGIT_BIASES)),
    st.sampled_from(["a", "\u00e9", "\U0001f308"]),
    st.sampled_from([1, 200, MODEL.max_tokens - 1]),
    st.sampled_from([1, 2, 64]),
)
inputs: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda length: {"token_ids": pb.TokenIds(ids=[LARGEST_ID] * length)}, around(MODEL.max_tokens - 1)),
    st.builds(lambda length: {"prompt": b"a" * length}, around(MODEL.max_tokens - 1)),
)
LARGEST_LISTS = (MAX_STOP_STRINGS, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_LOGIT_BIASES)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(asked=inputs, params=params, num_outputs=st.sampled_from([0, 1]), request_id=st.text("a~", max_size=129))
@example(  # the most that is ever taken over: all choices have nearly all of their tokens
    asked={"token_ids": pb.TokenIds(ids=[LARGEST_ID])},
    params=sampling(LARGEST_LISTS, "\U0001f308", MODEL.max_tokens - 1, 64),
    num_outputs=1,
    request_id="a" * 128,
)
@example(  # as large as a message may be
    asked={"token_ids": pb.TokenIds(ids=[LARGEST_ID])},
    params=sampling((1, MAX_MESSAGE_BYTES - 64, 0, 0), "a", 4, 1),
    num_outputs=0,
    request_id="",
)
def test_what_is_accepted_fits_into_a_command(
    asked: dict[str, Any], params: common_pb2.SamplingParams, num_outputs: int, request_id: str
) -> None:
    output = common_pb2.Output(token_ids=[LARGEST_ID] * (params.max_tokens - 1))
    request = pb.GenerateRequest(
        request_id=request_id, sampling=params, seeded=True, outputs=[output] * params.n * num_outputs, **asked
    )
    assume(request.ByteSize() <= MAX_MESSAGE_BYTES)
    try:
        read = READER.read(request)
    except InvalidArgumentError:
        return
    record = RequestRecord.of(read, 0)
    records = [record, *record.branches()]
    commands = [stream_request(each, NUMBER, CONFIG, LEASE) for each in records]
    commands.append(takeover_request(record, NUMBER))
    sizes = [generate_pb2.StreamCommand(open=each).ByteSize() for each in commands]
    assert max(sizes) <= MAX_COMMAND_BYTES


@pytest.mark.parametrize("beyond", range(4))
def test_one_more_of_any_list_is_refused(beyond: int) -> None:
    lengths = [length + (index == beyond) for index, length in enumerate(LARGEST_LISTS)]
    for asked, accepted in ((LARGEST_LISTS, True), (tuple(lengths), False)):
        num_stops, num_chars, num_ids, num_biases = asked
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5]), sampling=sampling((num_stops, num_chars, num_ids, num_biases), "a", 4, 1)
        )
        if accepted:
            assert READER.read(request).prompt_ids == (5,)
        else:
            with pytest.raises(InvalidArgumentError, match=r"sampling\.(stop|logit_bias)"):
                READER.read(request)
