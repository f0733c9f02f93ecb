"""Every field out of its limits is refused by name."""

import math
from dataclasses import replace
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
        ("stop", ("x", "")),
        ("stop", ("x", "x" * 1025)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(1025))),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("logprobs", 21),
        ("num_drafts", -1),
        ("num_drafts", 9),
    ],
)
def test_out_of_limits_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"sampling\.{field}\b"):
        SamplingParams(**{field: value})


def test_a_stop_token_id_that_is_named_again_is_kept_once() -> None:
    assert SamplingParams(stop_token_ids=(8, 7, 8)) == SamplingParams(stop_token_ids=(8, 7))


def test_limits_themselves_are_allowed() -> None:
    params = SamplingParams(
        max_tokens=1,
        min_tokens=1,
        temperature=100,
        top_p=1.0,
        min_p=1.0,
        seed=2**64 - 1,
        logprobs=20,
        stop=("\U0001f308" * 1024,) * 16,
        stop_token_ids=tuple(range(1024)),
        logit_bias=dict.fromkeys(range(1024), -100.0),
        n=64,
    )
    assert params.seed == 2**64 - 1


def test_the_text_of_a_refusal_is_short() -> None:
    for value in (("x" * 10**6,), ("x",) * 10**6, ("",) * 16):
        with pytest.raises(InvalidArgumentError) as caught:
            SamplingParams(stop=value)
        assert len(str(caught.value)) < 100


def test_a_choice_has_its_own_seed_and_shares_the_rest() -> None:
    params = SamplingParams(seed=2**64 - 1, n=3, prompt_logprobs=2, logit_bias={5: 1.0}, stop=("a",), top_k=7)
    first, second = params.of_choice(0), params.of_choice(1)
    assert first == replace(params, n=1)
    assert second == replace(params, n=1, seed=0, prompt_logprobs=None)
    assert second.logit_bias is params.logit_bias and second.stop is params.stop
    assert (params.n, params.seed, params.prompt_logprobs) == (3, 2**64 - 1, 2)


def test_a_choice_is_not_validated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=2)
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda _: pytest.fail("validated"))
    params.of_choice(1)
