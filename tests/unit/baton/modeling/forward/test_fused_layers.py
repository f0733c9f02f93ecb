"""A generation step in one native call is the step layer by layer, and is taken only where that holds."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.decode_rows import DecodeRows
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.fused_layers import fuse
from baton.modeling.forward.linear import has_panel_linear
from baton.modeling.forward.norms import HeadNorms, RmsNorm
from baton.modeling.forward.positions import LearnedTable, Positions
from baton.modeling.forward.selection import StepPicks
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kernels.products import WIDENED
from baton.modeling.kv.buffers import BufferSpan, KvBuffer, KvPlace
from baton.types import KernelChoice, TokenRange
from tests.support.models.tiny_models import random_decoder
from tests.support.paths import filled

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


def last_tokens(buffers: list[KvBuffer]) -> list[BufferSpan]:
    return [BufferSpan(each, TokenRange(each.tokens.end - 1, each.tokens.end)) for each in buffers]


def count_runs(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of tokens of every forward that is run in one call."""
    found: list[int] = []
    fused = decoder.fused
    assert fused is not None
    run = fused.run

    def noting(hidden_TD: Tensor, positions: Positions, rows: DecodeRows, picks: StepPicks | None) -> Tensor:
        found.append(len(hidden_TD))
        return run(hidden_TD, positions, rows, picks)

    monkeypatch.setattr(fused, "run", noting)
    return found


@torch.inference_mode()
def test_a_forward_has_the_same_bits_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=64, num_layers=3)
    buffers, others = filled(decoder, LENGTHS), filled(decoder, LENGTHS)
    runs = count_runs(decoder, monkeypatch)
    ids = [5, 6, 7, 8]
    whole_TD = decoder.forward(ids, last_tokens(buffers))
    assert runs == [4]
    turns = Counted()
    assert torch.equal(whole_TD, decoder.forward(ids, last_tokens(others), turns))
    assert turns.num_layers == 3
    assert runs == [4]
    assert all(torch.equal(each.data, other.data) for each, other in zip(buffers, others, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize(("torch_rows", "num_runs"), [(5, 1), (4, 0)])
def test_steps_of_rows_that_are_torchs_are_run_layer_by_layer(
    torch_rows: int, num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = KernelChoice("this", WIDENED, WIDENED, torch_rows)
    monkeypatch.setattr(KERNELS, "_choice", choice)
    decoder = random_decoder(dtype="bfloat16", head_dim=64)
    runs = count_runs(decoder, monkeypatch)
    decoder.forward([5, 6, 7, 8], last_tokens(filled(decoder, LENGTHS)))
    assert len(runs) == num_runs


@torch.inference_mode()
def test_rows_beside_a_longer_span_are_run_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=64)
    *rows, long = filled(decoder, LENGTHS)
    runs = count_runs(decoder, monkeypatch)
    spans = [*last_tokens(rows), BufferSpan(long, TokenRange(127, 130))]
    ids = [5, 6, 7, 8, 9, 10]
    assert torch.equal(decoder.forward(ids, spans), decoder.forward(ids, spans, Counted()))
    assert not runs


@torch.inference_mode()
def test_hidden_states_may_be_a_part_of_wider_rows() -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=64)
    assert decoder.fused is not None
    spans = last_tokens(filled(decoder, LENGTHS))
    rows = DecodeRows(
        [(token, span.place()) for token, span in enumerate(spans)], decoder.layout.row_bytes, decoder.config.windows
    )
    step = decoder.begin(spans)
    hidden_TD = decoder.embed([5, 6, 7, 8], step)
    wider_TD = torch.cat([hidden_TD, hidden_TD], dim=1)[:, : hidden_TD.shape[1]]
    assert not wider_TD.is_contiguous()
    whole_TD = decoder.fused.run(wider_TD, step.positions, rows)
    assert torch.equal(whole_TD, decoder.fused.run(hidden_TD, step.positions, rows))


def test_steps_that_do_not_fit_are_told() -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=64)
    fused, config = decoder.fused, decoder.config
    assert fused is not None
    place = KvPlace(0, 64, config.num_layers, 1)

    def rows_of(tokens: Sequence[int], place: KvPlace = place) -> DecodeRows:
        return DecodeRows([(token, place) for token in tokens], 64, config.windows)

    assert fused.fit(rows_of(range(288)), 288)
    assert not fused.fit(rows_of(range(289)), 289)
    assert not fused.fit(rows_of([1, 0]), 2)
    assert not fused.fit(rows_of([0, 1]), 3)
    apart = replace(place, num_layers=1, others=replace(place, num_layers=config.num_layers - 1))
    assert not fused.fit(rows_of([0, 1], apart), 2)


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
