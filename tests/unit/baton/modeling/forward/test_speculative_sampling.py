"""Tokens after drafts are distributed as the model's own: chi-square against the target, whatever the drafts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.drawing import NO_TOKEN
from baton.modeling.forward.sampling import SamplerState, choose, probabilities
from baton.modeling.forward.speculative_sampling import verify_draft
from baton.sampling_params import SamplingParams
from baton.types import SampledToken
from tests.support.models.sampling import p_value

VOCAB = 12
NUM_DRAWS = 2000
PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.4),
    "top_k": SamplingParams(temperature=1.2, top_k=5),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "biased": SamplingParams(temperature=1.0, logit_bias={2: 1.5, 5: -2.0}, repetition_penalty=1.4),
}


KINDS = ("near", "far", "certain")
EVERY_CHANGE = (("plain", "near"), ("plain", "certain"), ("top_k", "far"), ("top_p", "near"), ("biased", "far"))
CASES = [
    pytest.param(name, kind, marks=() if (name, kind) in EVERY_CHANGE else pytest.mark.nightly)
    for name in PARAMS
    for kind in KINDS
]


def logits(seed: int) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def state_of(params: SamplingParams, seed: int) -> SamplerState:
    return SamplerState(replace(params, seed=seed), [1, 2, 3])


def drafted(kind: str, params: SamplingParams, seed: int) -> tuple[int, Tensor | None]:
    """A draft, and the distribution that it was drawn from, in the way that a proposer does it."""
    if kind == "certain":
        return 3, None
    near_V = logits(0) + (0.3 if kind == "near" else 3.0) * logits(1)
    state = state_of(params, seed)
    (token_id,) = choose(near_V.unsqueeze(0), [state])
    return token_id, probabilities(near_V, state.params)


def target(params: SamplingParams) -> Tensor:
    adjusted_V = logits(0)
    state_of(params, 0).adjust(adjusted_V)
    return probabilities(adjusted_V, params)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_tokens_are_distributed_as_without_drafts(name: str, kind: str) -> None:
    """All of them, and those after a rejection as max(p - q, 0)."""
    params = PARAMS[name]
    counts_V, rejected_V = torch.zeros(VOCAB), torch.zeros(VOCAB)
    p_V, q_V, num_accepted = target(params), torch.zeros(VOCAB, dtype=torch.float64), 0
    for seed in range(NUM_DRAWS):
        draft_id, drafted_V = drafted(kind, params, seed)
        token, is_accepted = verify_draft(logits(0), state_of(params, seed), draft_id, drafted_V)
        counts_V[token.token_id] += 1
        num_accepted += is_accepted
        if not is_accepted:
            rejected_V[token.token_id] += 1
        q_V = torch.eye(VOCAB, dtype=torch.float64)[draft_id] if drafted_V is None else drafted_V
    assert p_value(counts_V, p_V) > 1e-4
    share = float(torch.minimum(p_V, q_V).sum())
    assert num_accepted / NUM_DRAWS == pytest.approx(share, abs=4 * (share * (1 - share) / NUM_DRAWS) ** 0.5 + 1e-9)
    if rejected_V.sum() > 100:
        assert p_value(rejected_V, (p_V - q_V).clamp(min=0)) > 1e-4


def test_a_greedy_row_accepts_its_own_choice_and_no_other() -> None:
    greedy, best = SamplingParams(temperature=0.0), int(logits(0).argmax())
    for draft_id in range(VOCAB):
        token, is_accepted = verify_draft(logits(0), state_of(greedy, 1), draft_id, None)
        assert (token.token_id, is_accepted) == (best, draft_id == best)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_behind_logits_that_are_not_finite_is_not_accepted(kind: str) -> None:
    params = PARAMS["plain"]
    draft_id, drafted_V = drafted(kind, params, 1)
    broken_V = logits(0)
    broken_V[draft_id - 1] = float("nan")
    assert verify_draft(broken_V, state_of(params, 1), draft_id, drafted_V) == (SampledToken(NO_TOKEN), False)
