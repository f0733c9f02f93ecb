"""A generation step in one native call is the step layer by layer, and is taken only where that holds."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.types import TokenRange
from modeling.decoder import Decoder
from modeling.fused_layers import fuse
from modeling.kv_buffers import BufferSpan, KvBuffer
from modeling.linear import has_panel_linear
from modeling.norms import HeadNorms, RmsNorm
from modeling.positions import LearnedTable
from tests.support.tiny_models import random_decoder

pytestmark = pytest.mark.skipif(not has_panel_linear(), reason="needs linear layers of our own")

LENGTHS = (3, 40, 17, 130)


class Counted:
    """A LayerTurns that only counts layers: they are run one by one for it."""

    def __init__(self) -> None:
        self.num_layers = 0

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        self.num_layers += 1

    def picks(self, layer: int, q_TNH: Tensor) -> None:
        pass

    def end(self, layer: int) -> None:
        pass


def filled(decoder: Decoder) -> list[KvBuffer]:
    """The KV of rows that have all but their last token."""
    buffers = []
    for seed, length in enumerate(LENGTHS):
        buffers.append(KvBuffer(decoder.layout, TokenRange(0, length)))
        ids = torch.randint(90, (length - 1,), generator=torch.Generator().manual_seed(seed)).tolist()
        decoder.forward(ids, [BufferSpan(buffers[-1], TokenRange(0, length - 1))])
    return buffers


def last_tokens(buffers: list[KvBuffer]) -> list[BufferSpan]:
    return [BufferSpan(each, TokenRange(each.tokens.end - 1, each.tokens.end)) for each in buffers]


@torch.inference_mode()
def test_a_forward_has_the_same_bits_in_one_call() -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=64, num_layers=3)
    assert decoder.fused is not None
    buffers, others = filled(decoder), filled(decoder)
    ids = [5, 6, 7, 8]
    whole_TD = decoder.forward(ids, last_tokens(buffers))
    turns = Counted()
    assert torch.equal(whole_TD, decoder.forward(ids, last_tokens(others), turns))
    assert turns.num_layers == 3
    assert all(torch.equal(each.data, other.data) for each, other in zip(buffers, others, strict=True))


@torch.inference_mode()
def test_rows_beside_a_longer_span_are_run_layer_by_layer() -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=64)
    *rows, long = filled(decoder)
    spans = [*last_tokens(rows), BufferSpan(long, TokenRange(127, 130))]
    ids = [5, 6, 7, 8, 9, 10]
    assert torch.equal(decoder.forward(ids, spans), decoder.forward(ids, spans, Counted()))


def test_what_does_not_fit_is_not_fused() -> None:
    fitting = random_decoder(dtype="bfloat16", head_dim=64)
    layers, positions, config = fitting.weights.layers, fitting.weights.positions, fitting.config
    assert fuse(layers, positions, config) is not None
    assert fuse(layers, positions, replace(config, windows=(None, 8))) is None
    assert fuse(layers, LearnedTable(torch.zeros(4, 4)), config) is None
    gain_H = RmsNorm(torch.ones(64, dtype=torch.bfloat16), 1e-5)
    normed = replace(layers[1], head_norm=HeadNorms(gain_H, gain_H, config.num_heads))
    assert fuse((layers[0], normed), positions, config) is None
    assert random_decoder(dtype="float32", head_dim=64).fused is None
    assert random_decoder(dtype="bfloat16", head_dim=16).fused is None
