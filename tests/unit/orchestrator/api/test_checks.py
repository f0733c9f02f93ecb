"""What may be asked: limits at their edges. Refusals by name, over the wire: tests/system/test_orchestrator.py."""

from collections.abc import Sequence
from typing import Any

import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_REQUEST_ID_CHARS
from baton.results.completion import ModelInfo
from baton.sampling_params import SamplingParams
from baton.types import FinishReason
from orchestrator.api.checks import RequestValidator
from tests.support.models.tiny_tokenizer import EOS_ID, VOCAB_SIZE, ids_of, letter_tokenizer

MODEL = ModelInfo("letters", 20, VOCAB_SIZE, "float32", False, "layout")


@pytest.fixture
def validator() -> RequestValidator:
    return RequestValidator(letter_tokenizer(), MODEL, (EOS_ID,))


def test_text_becomes_token_ids(validator: RequestValidator) -> None:
    assert validator.encode_text(b"abc") == ids_of("abc")


def test_a_prompt_may_leave_room_for_one_token(validator: RequestValidator) -> None:
    prompt_ids = validator.check_prompt_ids(range(19))
    validator.check_sampling(SamplingParams(max_tokens=1), len(prompt_ids))
    with pytest.raises(InvalidArgumentError, match="token_ids has 20 tokens: the model takes at most 19"):
        validator.check_prompt_ids(range(20))
    with pytest.raises(InvalidArgumentError, match=r"sampling\.max_tokens = 2 .* room for 1"):
        validator.check_sampling(SamplingParams(max_tokens=2), len(prompt_ids))


def test_the_last_token_id_is_known(validator: RequestValidator) -> None:
    assert validator.check_prompt_ids([VOCAB_SIZE - 1]) == (VOCAB_SIZE - 1,)


@pytest.mark.parametrize("request_id", ["", "r", "a b", "x" * MAX_REQUEST_ID_CHARS])
def test_a_printable_request_id_is_taken(validator: RequestValidator, request_id: str) -> None:
    validator.check_names(request_id, "letters")


@pytest.mark.parametrize("request_id", ["a\n", "\x1b[31m", "\u00e9", "x" * (MAX_REQUEST_ID_CHARS + 1)])
def test_a_request_id_that_would_spoil_a_log_is_refused(validator: RequestValidator, request_id: str) -> None:
    with pytest.raises(InvalidArgumentError, match="request_id"):
        validator.check_names(request_id, "")


def test_a_greedy_stream_is_resumed_without_a_seed(validator: RequestValidator) -> None:
    validator.check_resumption([[1, 2]], SamplingParams(), is_seeded=False)


def test_a_resumption_has_one_list_a_choice(validator: RequestValidator) -> None:
    with pytest.raises(InvalidArgumentError, match=r"outputs has 1 lists: sampling\.n is 2"):
        validator.check_num_outputs(1, SamplingParams(n=2))
    for num_outputs in (0, 2):
        validator.check_num_outputs(num_outputs, SamplingParams(n=2))


class Unread(Sequence[int]):
    """A list of token ids that only its length may be asked of."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a list that is too long was looked at")


def test_a_list_that_is_too_long_is_refused_by_its_length(validator: RequestValidator) -> None:
    with pytest.raises(InvalidArgumentError, match="token_ids has 1000000 tokens: the model takes at most 19"):
        validator.check_prompt_ids(Unread())
    with pytest.raises(InvalidArgumentError, match=r"outputs holds 1000000 tokens: sampling\.max_tokens is 5"):
        validator.check_resumption([Unread()], SamplingParams(max_tokens=5), is_seeded=True)
    with pytest.raises(InvalidArgumentError, match="outputs holds 1000000 tokens: the model's limit is 20"):
        validator.check_resumption([Unread()], SamplingParams(max_tokens=10**9), is_seeded=True)


@pytest.mark.parametrize(
    ("output_ids", "params", "end"),
    [
        ((), SamplingParams(), None),
        ((1, 2), SamplingParams(max_tokens=3), None),
        ((1, 2, 3), SamplingParams(max_tokens=3), FinishReason.LENGTH),
        ((1, EOS_ID), SamplingParams(), FinishReason.STOP),
        ((1, EOS_ID), SamplingParams(min_tokens=2), None),
        ((1, EOS_ID), SamplingParams(ignore_eos=True), None),
        ((1, 7), SamplingParams(stop_token_ids=(7,)), FinishReason.STOP),
        (ids_of("abcd"), SamplingParams(stop=("cd",)), FinishReason.STOP),
        (ids_of("abc"), SamplingParams(stop=("cd",)), None),
        (ids_of("abcd"), SamplingParams(stop=("cd",), min_tokens=4), None),
    ],
)
def test_a_stream_that_is_complete_is_recognised(
    validator: RequestValidator, output_ids: tuple[int, ...], params: SamplingParams, end: FinishReason | None
) -> None:
    assert validator.end_of((1,), output_ids, params) is end
