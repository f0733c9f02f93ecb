"""baton.modeling.forward.sampling against a naive float64 reference, and against values found by hand."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.errors import NotFiniteError
from baton.modeling.forward.drawing import NO_TOKEN, kept_ids
from baton.modeling.forward.sampling import SamplerState, sample, score
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, SampledToken
from tests.support.models.sampling import (
    EOS,
    LOGITS,
    OUTPUT,
    PROMPT,
    SETTINGS,
    draw,
    ids_of,
    make,
    normal_logits,
    reference_adjusted,
    reference_distribution,
)

# Same history, same token


def mixed_states(output: Sequence[int] = OUTPUT) -> list[SamplerState]:
    fields = [*SETTINGS, {"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.3}, {"top_p": 0.3}]
    return [make(2**63 + seed, output=output, logprobs=2, **fields[seed % len(fields)]) for seed in range(16)]


@pytest.mark.parametrize("vocab_size", [10, 1003, 49_152])
def test_a_row_is_sampled_alike_alone_and_in_a_batch(vocab_size: int) -> None:
    logits = torch.stack([normal_logits(vocab_size, row) for row in range(16)])
    together = sample(logits.clone(), mixed_states())
    alone = [sample(row.clone().unsqueeze(0), [state])[0] for row, state in zip(logits, mixed_states(), strict=True)]
    assert together == alone


def test_a_rebuilt_state_goes_on_like_the_one_that_was_appended_to() -> None:
    states = mixed_states([])
    for step in range(12):
        logits = torch.stack([normal_logits(50, 100 * step + row) for row in range(16)])
        rebuilt = [SamplerState(state.params, PROMPT, list(state.output_ids), EOS) for state in states]
        tokens = sample(logits.clone(), states)
        assert sample(logits.clone(), rebuilt) == tokens
        for state, token in zip(states, tokens, strict=True):
            state.append(token.token_id)
        assert [state.position for state in states] == [step + 1] * 16


def test_a_state_forgets_the_latest_tokens_as_if_they_had_never_been() -> None:
    states = mixed_states()
    for num_tokens in (0, 1, 5):
        for state in states:
            for token_id in (7, 3, 7, 11, PROMPT[0])[:num_tokens]:
                state.append(token_id)
            state.drop(num_tokens)
    logits = torch.stack([normal_logits(50, row) for row in range(16)])
    assert sample(logits.clone(), states) == sample(logits.clone(), mixed_states())
    assert [state.position for state in states] == [len(OUTPUT)] * 16


def test_sampling_does_not_change_the_state() -> None:
    state = make(4, repetition_penalty=1.5)
    assert ids_of(draw([state])) == ids_of(draw([state]))
    assert state.output_ids == OUTPUT


def test_another_seed_draws_other_tokens() -> None:
    logits = torch.zeros(1, 1000)
    assert len({ids_of(sample(logits.clone(), [make(seed)]))[0] for seed in (0, 1, 2**63, 2**63 + 1, 2**64 - 1)}) == 5


def test_a_state_made_in_inference_mode_may_be_appended_to_outside() -> None:
    with torch.inference_mode():
        state = make(frequency_penalty=1.0, temperature=0.0)
        logits = torch.tensor([LOGITS])
    state.append(0)
    assert ids_of(sample(logits, [state])) == [2]


# Greedy, penalties, bias, min_tokens: by hand


def greedy(logits: Sequence[float], **fields: Any) -> int:
    return ids_of(draw([make(temperature=0.0, **fields)], logits))[0]


def test_temperature_zero_takes_the_largest_logit_and_of_equal_ones_the_lower_id() -> None:
    assert greedy([0.0, 3.0, 2.0]) == greedy([0.0, 3.0, 3.0]) == 1


def test_greedy_ignores_the_seed_and_the_filters() -> None:
    assert {greedy([0.0, 3.0, 2.9], seed=seed, top_k=2, top_p=0.9) for seed in range(20)} == {1}


def test_a_tiny_temperature_is_greedy() -> None:
    assert ids_of(draw([make(temperature=1e-300)], [0.0, 3.0, 2.0])) == [1]


@pytest.mark.parametrize("fields", SETTINGS)
def test_adjusted_logits_equal_the_reference(fields: dict[str, Any]) -> None:
    state, logits = make(**fields), torch.tensor(LOGITS)
    state.adjust(logits)
    np.testing.assert_allclose(logits.numpy(), reference_adjusted(LOGITS, state), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"repetition_penalty": 2.0}, [1.0, -4.0, 2.0, 8.0], id="prompt and output, by the logit's sign"),
        pytest.param({"presence_penalty": 0.5}, [2.0, -2.5, 3.5, 8.0], id="once for a token of the output"),
        pytest.param({"frequency_penalty": 0.5}, [2.0, -3.0, 3.5, 8.0], id="for each time in the output"),
        pytest.param(
            {"repetition_penalty": 2.0, "logit_bias": {0: 1.0, 3: -1.0}}, [2.0, -4.0, 2.0, 7.0], id="then the bias"
        ),
        pytest.param(
            {"logit_bias": {7: 1.0}, "min_tokens": 9, "stop_token_ids": (8,)},
            [2.0, -2.0, 4.0, 8.0],
            id="no such tokens",
        ),
    ],
)
def test_penalties_and_biases_by_hand(fields: dict[str, Any], expected: list[float]) -> None:
    """Four logits, after the prompt 0, 1 and the output 1, 1, 2."""
    state, logits = make(prompt=[0, 1], output=[1, 1, 2], **fields), torch.tensor([2.0, -2.0, 4.0, 8.0])
    state.adjust(logits)
    assert logits.tolist() == expected


def test_penalties_without_any_seen_token_change_nothing() -> None:
    state, logits = make(prompt=[], output=[], repetition_penalty=2.0), torch.tensor([1.0, 2.0])
    state.adjust(logits)
    assert logits.tolist() == [1.0, 2.0]


def test_end_and_stop_tokens_are_forbidden_until_min_tokens() -> None:
    fields = {"min_tokens": 4, "stop_token_ids": (1,)}
    logits = [0.0, 9.0, 0.0, 1.0, 0.0, 9.5]
    assert greedy(logits, output=[0, 0, 0], **fields) == 3
    assert greedy(logits, output=[0, 0, 0, 0], **fields) == 5


def test_ignore_eos_forbids_no_end_token() -> None:
    logits = [0.0, 9.0, 0.0, 1.0, 0.0, 9.5]
    assert greedy(logits, min_tokens=9, ignore_eos=True, stop_token_ids=(1,)) == 5


@pytest.mark.parametrize("fields", [{}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_a_row_with_every_token_forbidden_still_gets_a_token(fields: dict[str, Any]) -> None:
    state = make(min_tokens=9, stop_token_ids=(0, 1, 2), logprobs=2, **fields)
    (token,) = draw([state], [1.0, 2.0, 3.0])
    assert token.token_id in (0, 1, 2)
    assert (token.logprob, token.top) == (0.0, ())


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"repetition_penalty": 2.0}, {"logit_bias": {0: 1.0}}])
def test_a_row_whose_logits_are_not_finite_has_neither_token_nor_logprobs(fields: dict[str, Any]) -> None:
    for value in (math.nan, math.inf):
        assert draw([make(logprobs=2, **fields)], [*LOGITS[:4], value, *LOGITS[5:]]) == [SampledToken(NO_TOKEN)]


def test_a_prompt_whose_logits_are_not_finite_has_no_scores() -> None:
    with pytest.raises(NotFiniteError, match="logits of a prompt are not finite"):
        score(torch.tensor([[1.0, 2.0], [math.nan, 0.0]]), [0, 1], 1)


# Filters


def reference_kept(scaled: Tensor, params: SamplingParams) -> list[int]:
    p = reference_distribution(scaled.double().numpy(), params)
    return np.flatnonzero(p).tolist()


def kept(scaled: Tensor, **fields: Any) -> list[int]:
    return sorted(kept_ids(scaled, SamplingParams(temperature=1.0, **fields)).tolist())


@pytest.mark.parametrize("vocab_size", [3, 50, 5000])
@pytest.mark.parametrize("top_k", [0, 1, 7, 900])
@pytest.mark.parametrize("top_p", [1.0, 0.01, 0.6, 0.97])
@pytest.mark.parametrize("min_p", [0.0, 0.03, 1.0])
def test_filters_keep_what_the_reference_keeps(vocab_size: int, top_k: int, top_p: float, min_p: float) -> None:
    scaled = normal_logits(vocab_size, vocab_size + top_k)
    scaled -= scaled.max()
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert sorted(kept_ids(scaled, params).tolist()) == reference_kept(scaled, params)


def test_top_p_finds_its_mass_when_it_is_spread_over_the_whole_vocabulary() -> None:
    scaled = torch.zeros(10_000)
    assert kept(scaled, top_p=0.75) == list(range(7500))


def test_top_k_keeps_the_lower_ids_of_equal_tokens() -> None:
    scaled = torch.tensor([-1.0, 0.0, -1.0, -1.0, -2.0] + [-9.0] * 95)
    assert kept(scaled, top_k=3) == [0, 1, 2]


def test_top_p_measures_its_mass_among_what_min_p_and_top_k_keep() -> None:
    scaled = torch.tensor([0.4, 0.3, 0.2, 0.1]).div(0.4).log()
    assert kept(scaled, top_p=0.65) == [0, 1]
    assert kept(scaled, top_p=0.65, top_k=2) == [0, 1]
    assert kept(scaled, top_p=0.55, top_k=2) == [0]
    assert kept(scaled, top_p=0.55) == [0, 1]
    assert kept(scaled, top_p=0.55, min_p=0.7) == [0]


def test_the_largest_token_always_stays() -> None:
    assert kept(torch.tensor([-1.0, 0.0, -1.0]), top_p=1e-9, min_p=1.0, top_k=1) == [1]


# Logprobs


def logprobs_of(logits: Sequence[float], **fields: Any) -> SampledToken:
    return draw([make(**fields)], logits)[0]


def test_no_logprobs_unless_asked_for() -> None:
    token = logprobs_of(LOGITS)
    assert (token.logprob, token.top) == (None, ())


def test_logprobs_of_the_chosen_token_alone() -> None:
    token = logprobs_of([1.0, 2.0], logprobs=0, temperature=0.0)
    assert token.logprob == pytest.approx(-math.log1p(math.exp(-1)))
    assert token.top == ()


@pytest.mark.parametrize("fields", SETTINGS)
def test_logprobs_are_the_log_softmax_before_temperature_and_filters(fields: dict[str, Any]) -> None:
    state = make(1, logprobs=3, **fields)
    (token,) = draw([state])
    logits = reference_adjusted(LOGITS, state)
    expected = logits - np.log(np.exp(logits).sum())
    assert token.logprob == pytest.approx(expected[token.token_id], abs=1e-6)
    order = sorted(range(len(LOGITS)), key=lambda token_id: (-expected[token_id], token_id))[:3]
    assert [top.token_id for top in token.top] == order
    assert [top.logprob for top in token.top] == pytest.approx(expected[order].tolist(), abs=1e-6)


def test_of_equally_likely_tokens_the_lower_ids_are_listed_first() -> None:
    logits = [0.0] * 500
    assert [top.token_id for top in logprobs_of(logits, logprobs=4).top] == [0, 1, 2, 3]


def test_more_logprobs_than_tokens_lists_all() -> None:
    assert len(logprobs_of([1.0, 2.0], prompt=[0], output=[], logprobs=20).top) == 2


def test_logprobs_do_not_change_the_token() -> None:
    states = [make(seed, **fields) for seed, fields in enumerate(SETTINGS)]
    with_logprobs = [make(seed, logprobs=5, **fields) for seed, fields in enumerate(SETTINGS)]
    assert ids_of(draw(states)) == ids_of(draw(with_logprobs))


# The end of a stream


@pytest.mark.parametrize(
    ("output", "fields", "expected"),
    [
        ([], {}, None),
        ([1, 2], {}, None),
        ([1, 5], {}, FinishReason.STOP),
        ([1, 2], {"stop_token_ids": (2,)}, FinishReason.STOP),
        ([1, 5], {"ignore_eos": True}, None),
        ([1, 2], {"ignore_eos": True, "stop_token_ids": (2,)}, FinishReason.STOP),
        ([1, 2], {"max_tokens": 3}, None),
        ([1, 2, 3], {"max_tokens": 3}, FinishReason.LENGTH),
        ([1, 5], {"max_tokens": 2}, FinishReason.STOP),
        ([1, 5], {"min_tokens": 2}, None),
        ([1, 1, 5], {"min_tokens": 2}, FinishReason.STOP),
    ],
)
def test_a_stream_ends_with_an_end_or_stop_token_or_the_last_it_may_have(
    output: list[int], fields: dict[str, Any], expected: FinishReason | None
) -> None:
    """The end of text is token 5. It does not count where it is ignored, or within the first `min_tokens`."""
    assert make(output=output, **fields).finish_after_last() is expected
