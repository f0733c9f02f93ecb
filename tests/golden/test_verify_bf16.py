"""Steps that verify drafts, in bf16 on natural text: their logits err against fp32 at most 1.1 times as much as those
of plain steps, by each way to multiply that this processor has, in one call for all layers and piece by piece.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder, LayerTurns
from baton.modeling.forward.linear import has_panel_linear
from baton.modeling.kernels import native
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kernels.processor import processor_kind
from baton.modeling.kernels.products import DOT, TILES, WIDENED
from baton.modeling.kv.buffers import BufferSpan
from baton.planning.speculation import MOST_DRAFTS
from baton.types import KernelChoice, TokenRange
from tests.support.kernels.paths import has_tiles
from tests.support.models.texts import passage_ids
from tests.support.paths import advance_hidden, buffer_for, rms_error

NUM_SCORED = 2048
MAX_RATIO = 1.1
NUM_BY_PIECES = 576
"""First tokens of which each bit is compared: whole steps."""
MOST_ROWS = 288
"""Most tokens of a step that one call takes through all layers."""

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(not has_panel_linear(), reason="needs linear layers of our own"),
]


class Turns:
    """A LayerTurns that does nothing, so that layers are run piece by piece."""

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        pass

    def picks(self, layer: int, q_TNH: Tensor) -> None:
        pass

    def end(self, layer: int) -> None:
        pass


@torch.inference_mode()
def in_steps(decoder: Decoder, token_ids: Sequence[int], num_new: int, turns: LayerTurns | None) -> Tensor:
    """Hidden states `[T, D]` of all tokens, as steps compute them in which each row has `num_new`: the last one known,
    and drafts. Rows share one buffer, as in `tests.support.paths.in_single_steps`, and go in batches."""
    buffer = buffer_for(decoder, len(token_ids))
    parts = []
    for batch in TokenRange(0, len(token_ids)).split(MOST_ROWS // num_new * num_new):
        spans = [BufferSpan(buffer, tokens) for tokens in batch.split(num_new)]
        ids = token_ids[batch.start : batch.end]
        parts.append(decoder.forward(ids, spans, turns, most_queries=num_new))
    return torch.cat(parts)


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> tuple[Decoder, Tensor]:
    """The model in fp32, and its hidden states."""
    decoder = load_decoder(smollm2)
    with torch.inference_mode():
        return decoder, advance_hidden(decoder, buffer_for(decoder, NUM_SCORED), passage_ids(smollm2, NUM_SCORED), 0)


def choices() -> list[KernelChoice]:
    """Each way to multiply, of linear layers and of attention."""
    kind = processor_kind()
    has_dots = native.load() and native.operators().has_dots
    products = [(WIDENED, WIDENED), *[(DOT, WIDENED), (DOT, DOT)] * has_dots, *[(TILES, TILES)] * has_tiles()]
    return [KernelChoice(kind, attention, panels, None) for attention, panels in products]


@torch.inference_mode()
@pytest.mark.parametrize("choice", choices(), ids=lambda choice: f"{choice.attention}-{choice.panels}")
def test_verifying_errs_no_more_than_plain_steps(
    choice: KernelChoice, exact: tuple[Decoder, Tensor], smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KERNELS, "_choice", choice)
    token_ids = passage_ids(smollm2, NUM_SCORED)
    rounded = load_decoder(smollm2, dtype="bfloat16")
    assert rounded.fused is not None
    plain = rms_error(rounded, in_steps(rounded, token_ids, 1, None), *exact)
    assert plain > 0.01, "bf16 must differ from fp32, else nothing was compared"
    for num_new in (4, 1 + MOST_DRAFTS):
        fused_TD = in_steps(rounded, token_ids, num_new, None)
        verifying = rms_error(rounded, fused_TD, *exact)
        print(f"{choice.attention}: RMS logit error, plain steps {plain:.4f}, {num_new} tokens a row {verifying:.4f}")
        assert verifying <= MAX_RATIO * plain
        by_pieces_TD = in_steps(rounded, token_ids[:NUM_BY_PIECES], num_new, Turns())
        assert torch.equal(by_pieces_TD, fused_TD[:NUM_BY_PIECES])
