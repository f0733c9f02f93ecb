"""Every field out of its limits is refused by name."""

import math
from typing import Any

import pytest

from baton.errors import InvalidArgumentError
from baton.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 257),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (-1,)),
        ("logprobs", 21),
    ],
)
def test_out_of_limits_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"sampling\.{field} = "):
        SamplingParams(**{field: value})


def test_limits_themselves_are_allowed() -> None:
    params = SamplingParams(
        max_tokens=1, min_tokens=1, temperature=100, top_p=1.0, min_p=1.0, seed=2**64 - 1, logprobs=20
    )
    assert params.seed == 2**64 - 1
