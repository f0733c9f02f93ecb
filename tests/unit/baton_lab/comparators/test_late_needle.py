"""A key that nobody looks at for 500 steps, and then everybody does: InfiniGen attends to it, H2O has dropped it.

Policies, memory and kernels are the real ones; queries, keys and values are made here, in place of a model's.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.decode_rows import DecodeRows
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.linear import make_linear
from baton.modeling.forward.norms import unchanged
from baton.modeling.forward.positions import LearnedTable
from baton.modeling.forward.selection import Selection
from baton.modeling.kv.buffers import KvBuffer, KvRows
from baton.modeling.sparse.bases import Basis, BasisKind, fit_layer
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import SlotId, TokenRange
from baton_lab.comparators.h2o import H2oResidency, H2oRow
from baton_lab.comparators.heavy_hitters import HeavyBudget
from baton_lab.comparators.oracle import OracleResidency
from generate_workers.residency.port import KvShape
from generate_workers.residency.sparse.infinigen import InfinigenResidency, InfinigenRow
from tests.support.engines.devices import PoisonedMemory
from tests.support.engines.selective import lists
from tests.support.kernels.brute_attention import brute_attention
from tests.support.kernels.paths import needs_rows
from tests.support.models.tiny_models import random_decoder

pytestmark = needs_rows
Policy = InfinigenResidency | H2oResidency | OracleResidency
SLOT = SlotId(0)
DECODER = random_decoder(num_layers=3)
LAYOUT = DECODER.layout
LAYER = 2
"""The only one that is not whole."""
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
NUM_PROMPT, NUM_STEPS, NEEDLE = 120, 500, 40
LAST = NUM_PROMPT + NUM_STEPS
"""The query that wants the needle."""
SELECTION = Selection(alpha=4.0, most_share=0.05, num_first=2, num_last=8)
BUDGET = HeavyBudget(0.2, 0.2)
WANTED, SHUNNED = 0, 1
"""Columns: what the last query looks for and only the needle has; what all others look for and all keys but the needle
have."""


def noise(*shape: int, seed: int) -> Tensor:
    """Random vectors, as of a model whose first columns are the strongest."""
    x = torch.randn(*shape, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    return x * torch.tensor([2.0] * 4 + [0.5] * (HEAD_DIM - 4))


def haystack() -> tuple[Tensor, Tensor, Tensor]:
    """`(q_TNH, k_TGH, v_TGH)` of all tokens up to the last query's."""
    q_TNH = noise(LAST + 1, NUM_HEADS, seed=1)
    k_TGH, v_TGH = noise(LAST + 1, NUM_KV_HEADS, seed=2), noise(LAST + 1, NUM_KV_HEADS, seed=3)
    q_TNH[:, :, WANTED], q_TNH[:, :, SHUNNED] = 0.0, 6.0
    k_TGH[:, :, SHUNNED] = 1.0
    k_TGH[NEEDLE, :, WANTED], k_TGH[NEEDLE, :, SHUNNED] = 12.0, -12.0
    q_TNH[LAST, :, WANTED], q_TNH[LAST, :, SHUNNED] = 12.0, 0.0
    return q_TNH, k_TGH, v_TGH


Q_TNH, K_TGH, V_TGH = haystack()
FULL_NH = brute_attention(Q_TNH[LAST:], KvRows(K_TGH, V_TGH, 0), LAST)[0][0]
"""The last query's attention to all keys, in fp64."""


def fitted(kind: BasisKind) -> Basis:
    """To queries and keys in general, which know of no needle."""
    matrices = fit_layer(kind, noise(400, NUM_HEADS, seed=4), noise(400, NUM_KV_HEADS, seed=5), num_columns=6)
    return Basis(kind, *(each.float().repeat(LAYOUT.num_layers, 1, 1, 1) for each in matrices))


def transparent() -> Decoder:
    """Its queries are what a layer runs on, so that guessed ones can be made here, too."""
    to_queries = torch.cat((torch.eye(NUM_HEADS * HEAD_DIM), torch.zeros(2 * NUM_KV_HEADS * HEAD_DIM, 64)))
    layers = tuple(
        dataclasses.replace(layer, attention_norm=unchanged, qkv=make_linear(to_queries))
        for layer in DECODER.weights.layers
    )
    positions = LearnedTable(torch.zeros(LAST + 1, 64))
    return Decoder(DECODER.config, dataclasses.replace(DECODER.weights, layers=layers, positions=positions))


def infinigen(kind: BasisKind, lookahead: int) -> Callable[[KvShape], InfinigenResidency]:
    prepared = PreparedSelection(fitted(kind), SELECTION, lookahead, LAYOUT.model_fingerprint, "text")
    return lambda shape: InfinigenResidency(shape, PoisonedMemory, prepared, transparent())


def made(make: Callable[[KvShape], Policy]) -> Policy:
    residency = make(KvShape(LAYOUT, DECODER.config.windows, 1, LAST + 1))
    residency.open(SLOT, NUM_PROMPT, LAST + 1)
    return residency


def push_prompt(residency: Policy) -> None:
    whole = TokenRange(0, NUM_PROMPT)
    buffer = KvBuffer(LAYOUT, whole)
    buffer.data[:, :, 0], buffer.data[:, :, 1] = K_TGH[:NUM_PROMPT], V_TGH[:NUM_PROMPT]
    for layer in range(LAYOUT.num_layers):
        for tokens in whole.split(50):
            residency._rows[SLOT].write(layer, tokens, buffer.export(layer, tokens)).result()


@torch.inference_mode()
def run(residency: Policy, position: int) -> tuple[Tensor, list[list[int]]]:
    """A step: what its query gets in LAYER, `[N, H]`, and from which keys of each kv head."""
    tokens = TokenRange(position, position + 1)
    q_1NH, k_1GH, v_1GH = (x[position : position + 1] for x in (Q_TNH, K_TGH, V_TGH))
    out_1NH, picks = q_1NH, None
    with residency.step([(SLOT, tokens)]) as step:
        place = step.spans[0].place()
        assert place is not None
        rows = DecodeRows([(0, place)], LAYOUT.row_bytes, DECODER.config.windows)
        for layer in range(LAYOUT.num_layers):
            step.begin(layer, q_1NH.flatten(1))
            rows.append(layer, k_1GH, v_1GH)
            picks = step.picks(layer, q_1NH)
            out_1NH = rows.attend(layer, q_1NH, NUM_KV_HEADS, picks)
            step.end(layer)
    return out_1NH[0], lists(picks, 0)


def test_the_needle_gets_no_attention_before_and_all_of_it_at_last() -> None:
    """Full attention, in fp64."""
    groups_TGJH = Q_TNH.double().view(LAST + 1, NUM_KV_HEADS, -1, HEAD_DIM)
    scores_GJTS = torch.einsum("tgjh,sgh->gjts", groups_TGJH, K_TGH.double()) / HEAD_DIM**0.5
    is_later_TS = torch.ones(LAST + 1, LAST + 1, dtype=torch.bool).triu(1)
    weights_GJT = scores_GJTS.masked_fill(is_later_TS, -torch.inf).softmax(-1)[..., NEEDLE]
    assert weights_GJT[..., :LAST].max() < 1e-6
    assert weights_GJT[..., LAST].min() > 0.999
    assert SELECTION.num_first <= NEEDLE <= LAST - SELECTION.num_last


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("kind", [BasisKind.COLUMNS, BasisKind.SKEW, BasisKind.CENTRED])
def test_infinigen_leaves_it_alone_and_then_attends_to_it(kind: BasisKind, lookahead: int) -> None:
    residency = made(infinigen(kind, lookahead))
    push_prompt(residency)
    for position in range(NUM_PROMPT, LAST):
        _, kept = run(residency, position)
        assert all(NEEDLE not in keys for keys in kept)
    out_NH, kept = run(residency, LAST)
    assert all(NEEDLE in keys for keys in kept)
    assert all(len(keys) < LAST // 10 for keys in kept)
    torch.testing.assert_close(out_NH.double(), FULL_NH, atol=1e-3, rtol=0)
    residency._rows[SLOT].release()


def test_what_infinigen_does_not_hold_it_does_not_find() -> None:
    """Without the needle's partial key, the same steps miss it: so the test above can fail."""
    residency = made(infinigen(BasisKind.COLUMNS, 0))
    push_prompt(residency)
    for position in range(NUM_PROMPT, LAST):
        run(residency, position)
    row = residency._rows[SLOT]
    assert isinstance(row, InfinigenRow)
    row.partial.write(LAYER, NEEDLE, torch.zeros(1, NUM_KV_HEADS, 6))
    out_NH, kept = run(residency, LAST)
    assert all(NEEDLE not in keys for keys in kept)
    assert is_far(out_NH)
    row.release()


def test_h2o_has_dropped_it_for_good() -> None:
    residency = made(lambda shape: H2oResidency(shape, PoisonedMemory, DECODER, BUDGET))
    for position in range(LAST):
        run(residency, position)
        row = residency._rows[SLOT]
        assert isinstance(row, H2oRow)
        assert position < NUM_PROMPT or not (row.index.hitters[LAYER].positions_GK == NEEDLE).any()
    out_NH, kept = run(residency, LAST)
    assert all(NEEDLE not in keys for keys in kept)
    assert is_far(out_NH)
    residency._rows[SLOT].release()


def test_the_oracle_finds_it() -> None:
    residency = made(lambda shape: OracleResidency(shape, PoisonedMemory, SELECTION))
    push_prompt(residency)
    for position in range(NUM_PROMPT, LAST):
        run(residency, position)
    out_NH, kept = run(residency, LAST)
    assert all(NEEDLE in keys for keys in kept)
    torch.testing.assert_close(out_NH.double(), FULL_NH, atol=1e-3, rtol=0)
    residency._rows[SLOT].release()


def is_far(out_NH: Tensor) -> bool:
    """Return whether every head's result differs from full attention's."""
    return bool(((out_NH - FULL_NH).norm(dim=1) > 0.5 * FULL_NH.norm(dim=1)).all())
