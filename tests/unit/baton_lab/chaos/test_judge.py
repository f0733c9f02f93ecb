"""Tokens are held against those of the calm run; where the decision was close, they may differ."""

from dataclasses import replace

import pytest
import torch

from baton.modeling.forward.sampling import SamplerState, sample
from baton.results.completion import Choice, Completion
from baton.sampling_params import SamplingParams
from baton.types import SampledToken
from baton_lab.chaos.judge import MARGIN, CalmJudge, margin_of
from baton_lab.chaos.report import Answer, Outcome
from baton_lab.chaos.schedule import Ask

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0)
ASK = Ask(0, stem=0, num_prompt_tokens=4, vocab_size=50, params=PARAMS)


def tokens(*pairs: tuple[int, float]) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(token_id, logprob) for token_id, logprob in pairs)


CALM = tokens((5, -0.5), (6, -0.7), (7, -0.1))


def judge(*choices: tuple[SampledToken, ...], ask: Ask = ASK) -> CalmJudge:
    made = tuple(Choice(index, "", tokens, None) for index, tokens in enumerate(choices))
    output = Completion("calm", made, (), "", None, None, None, None, None, 0)
    return CalmJudge([Answer(ask, Outcome.ANSWERED, output, "", ())])


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_same_tokens_are_right_as_far_as_they_go(num_tokens: int) -> None:
    made = judge(CALM)
    assert made(ASK, 0, CALM[:num_tokens]) == ""
    assert (made.num_exceptions, made.num_tokens) == (0, num_tokens)


def test_another_token_is_wrong() -> None:
    found = tokens((5, -0.5), (9, -0.9), (7, -0.1))
    assert judge(CALM)(ASK, 0, found) == "token 1 is 9 instead of 6, by a margin of 0.2000"


def test_a_close_decision_may_fall_otherwise_and_what_follows_is_another_stream() -> None:
    made = judge(CALM)
    assert made(ASK, 0, tokens((5, -0.5), (9, -0.7 - MARGIN / 2), (8, -3.0))) == ""
    assert made.num_exceptions == 1
    assert not made.has_too_many_exceptions
    made(ASK, 0, tokens((9, -0.5 - MARGIN / 2)))
    assert made.has_too_many_exceptions


def test_each_choice_has_its_own_tokens() -> None:
    ask = replace(ASK, params=replace(PARAMS, n=2))
    other = tokens((8, -0.2))
    made = judge(CALM, other, ask=ask)
    assert made(ask, 0, CALM) == made(ask, 1, other) == ""
    assert made(ask, 1, CALM[:1]).startswith("token 0 is 5 instead of 8")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_margin_is_the_gap_between_the_samplers_scores(temperature: float) -> None:
    """Raise the loser by the margin, and a hair more, and it wins; by a hair less, and it does not."""
    params = replace(PARAMS, temperature=temperature, seed=17)
    generator = torch.Generator().manual_seed(1)
    for position in range(10):
        logits_V = torch.randn(40, generator=generator)
        state = SamplerState(params, (1, 2), (3,) * position, (0,))
        due = sample(logits_V[None].clone(), [state])[0]
        logprobs_V = logits_V.log_softmax(0)
        loser = (due.token_id + 1) % 40
        gap = margin_of(params, position, due, SampledToken(loser, float(logprobs_V[loser])))
        for hair, winner in ((1e-3, loser), (-1e-3, due.token_id)):
            raised_V = logits_V.clone()
            raised_V[loser] += (gap + hair) * (temperature or 1.0)
            assert sample(raised_V[None], [state])[0].token_id == winner
