"""Prompts whose KV was pushed run again: tokens are known by their values, queries are what they were."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from baton.errors import ConfigError, ModelError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.positions import LearnedTable
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.types import TokenRange
from baton_lab.comparators.pushed_prompts import PushedPrompts
from tests.support.engines.generation import prefilled, prompt
from tests.support.models.tiny_models import random_decoder

DECODER = random_decoder(num_layers=4)
NUM_ALL = 64
IDS = prompt(NUM_ALL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_known_by_their_values(dtype: str) -> None:
    decoder = random_decoder(num_layers=2, dtype=dtype)
    ids = prompt(300)
    buffer, _ = prefilled(decoder, ids)
    with torch.inference_mode():
        assert PushedPrompts(decoder).token_ids(buffer.span, TokenRange(20, 300)) == list(ids[20:])


@torch.inference_mode()
def test_queries_are_those_of_the_prompts_own_forward() -> None:
    buffer, _ = prefilled(DECODER, IDS)
    own: list[Tensor] = []
    span = BufferSpan(KvBuffer(DECODER.layout, TokenRange(0, NUM_ALL)), TokenRange(0, NUM_ALL))
    step = DECODER.begin([span])
    hidden_TD = DECODER.embed(IDS, step)
    for layer in range(DECODER.layout.num_layers):
        own.append(q_TNH := DECODER.project(layer, hidden_TD, step))
        attention = DECODER.attention(layer, q_TNH, 0)
        attention.add(*span.segments(layer))
        hidden_TD = DECODER.complete(layer, hidden_TD, attention.result())
    had: list[tuple[int, TokenRange]] = []

    def check(layer: int, q_TNH: Tensor, tokens: TokenRange) -> None:
        had.append((layer, tokens))
        torch.testing.assert_close(q_TNH, own[layer][tokens.start : tokens.end], atol=1e-4, rtol=1e-4)

    PushedPrompts(DECODER).run(buffer.span, TokenRange(9, NUM_ALL), check)
    assert had == [(layer, TokenRange(9, NUM_ALL)) for layer in range(DECODER.layout.num_layers)]


@pytest.mark.parametrize("value", [None, math.nan])
def test_kv_of_another_model_is_refused(value: float | None) -> None:
    buffer, _ = prefilled(random_decoder(num_layers=4, seed=1) if value is None else DECODER, IDS)
    if value is not None:
        buffer.data[0, 11:, 1, 0, 0] = value
    at = 0 if value is None else 11
    with torch.inference_mode(), pytest.raises(ModelError, match=f"position {at} is of no token of this model"):
        PushedPrompts(DECODER).token_ids(buffer.span, TokenRange(0, NUM_ALL))


def test_models_with_learned_positions_are_refused() -> None:
    weights = dataclasses.replace(DECODER.weights, positions=LearnedTable(torch.zeros(512, 64)))
    with pytest.raises(ConfigError, match="residency h2o is not supported for models with learned positions: use"):
        PushedPrompts(Decoder(DECODER.config, weights))
