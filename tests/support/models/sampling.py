"""Reference implementation of sampling in float64, and helpers that create states and draw tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from baton.modeling.forward.sampling import SamplerState, sample
from baton.sampling_params import SamplingParams
from baton.types import SampledToken

Floats = NDArray[np.float64]
LOGITS = [2.0, 1.5, 1.5, 0.3, -0.2, -1.0, 0.9, 1.1, -1.6, 0.0]
PROMPT, OUTPUT, EOS = [3, 3, 7], [1, 1, 6], [5]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.85, "min_p": 0.1},
    {"repetition_penalty": 1.6, "presence_penalty": 0.5, "frequency_penalty": -0.4},
    {"logit_bias": {8: 4.0, 0: -100.0}, "min_tokens": 9, "stop_token_ids": (2,), "max_tokens": 10},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 0.7, "logit_bias": {9: 1.0}},
]


DRAWN: list[dict[str, Any]] = [
    {},
    {"temperature": 1e-4},
    {"temperature": 0.3},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 40, "temperature": 2.0},
    {"top_k": 3000, "top_p": 0.99},
    {"top_k": 10**9},
    {"top_p": 1e-9},
    {"top_p": 0.7},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.02, "temperature": 1.4},
]
"""Sampling parameters of sequences that sample at random, with each filter alone and several combined."""


def make(seed: int = 0, prompt: Sequence[int] = PROMPT, output: Sequence[int] = OUTPUT, **fields: Any) -> SamplerState:
    return SamplerState(SamplingParams(**{"temperature": 1.0, **fields, "seed": seed}), prompt, output, EOS)


def draw(states: Sequence[SamplerState], logits: Sequence[float] = LOGITS) -> list[SampledToken]:
    return sample(torch.tensor([list(logits)] * len(states)), states)


def ids_of(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def reference_adjusted(logits: Sequence[float], state: SamplerState) -> Floats:
    """Return the logits after penalties, bias and min_tokens, computed token by token."""
    params, result = state.params, np.array(logits, dtype=np.float64)
    for token_id in range(len(result)):
        count = state.output_ids.count(token_id)
        if count or token_id in PROMPT:
            factor = params.repetition_penalty
            result[token_id] = result[token_id] / factor if result[token_id] > 0 else result[token_id] * factor
        result[token_id] -= params.frequency_penalty * count + (params.presence_penalty if count else 0)
        result[token_id] += params.logit_bias.get(token_id, 0)
        if state.position < params.min_tokens and token_id in (*params.stop_token_ids, *EOS):
            result[token_id] = -np.inf
    return result


def reference_distribution(logits: Floats, params: SamplingParams) -> Floats:
    """Return the distribution after temperature, min-p, top-k and top-p. Probabilities are normalised after each
    filter."""
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = sorted(range(len(p)), key=lambda token_id: (-p[token_id], token_id))
    for token_id in order[params.top_k or len(p) :]:
        p[token_id] = 0
    p /= p.sum()
    mass = 0.0
    for token_id in order:
        if mass >= params.top_p:
            p[token_id] = 0
        mass += p[token_id]
    result: Floats = p / p.sum()
    return result


def normal_logits(vocab_size: int, seed: int) -> Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def p_value(counts_V: Tensor, expected_V: Tensor) -> float:
    """Return the p-value of a chi-square test. Rare tokens are combined into one class. Fails if a token with
    probability 0 was drawn."""
    assert not counts_V[expected_V == 0].any()
    expected_V = expected_V / expected_V.sum() * counts_V.sum()
    is_rare_V = expected_V < 5
    expected = [*expected_V[~is_rare_V].tolist(), float(expected_V[is_rare_V].sum())]
    counts = [*counts_V[~is_rare_V].tolist(), float(counts_V[is_rare_V].sum())]
    if not expected[-1]:
        expected, counts = expected[:-1], counts[:-1]
    return float(stats.chisquare(counts, expected).pvalue) if len(expected) > 1 else 1.0
