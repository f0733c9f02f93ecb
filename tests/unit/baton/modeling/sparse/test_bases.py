"""Bases keep scores where they keep all columns, are one a kv head, and hold for the whole context."""

import math

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.positions import LearnedTable
from baton.modeling.forward.rope import RotaryTable, apply_rotary
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.modeling.sparse.bases import (
    NUM_PLACES,
    NUM_WHOLE_LAYERS,
    Basis,
    BasisKind,
    fit_bases,
    fit_layer,
    sample_layers,
    skew,
    spread,
)
from baton.types import TokenRange
from tests.support.models.tiny_models import random_decoder

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, CONTEXT = 6, 2, 16, 256
SHARED = NUM_HEADS // NUM_KV_HEADS
KINDS = list(BasisKind)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Columns of different strengths, so that some matter more, and neighbours mixed, so that none stands alone."""
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x *= torch.linspace(0.2, 2.0, shape[-1], dtype=torch.float64)
    return x + 0.5 * x.roll(1, -1)


def queries_and_keys(num_tokens: int = 60) -> tuple[Tensor, Tensor]:
    return noise(num_tokens, NUM_HEADS, HEAD_DIM, seed=1), noise(num_tokens, NUM_KV_HEADS, HEAD_DIM, seed=2)


def scores(q_TNX: Tensor, k_TGX: Tensor) -> Tensor:
    """`[N, T, T]`, by whatever columns both have."""
    return torch.einsum("qnx,knx->nqk", q_TNX, k_TGX.repeat_interleave(q_TNX.shape[1] // k_TGX.shape[1], 1))


def partial_scores(kind: BasisKind, q_TNH: Tensor, k_TGH: Tensor, num_columns: int) -> Tensor:
    q_GHR, k_GHR = fit_layer(kind, q_TNH, k_TGH, num_columns)
    q_TNR = torch.einsum("tnh,nhr->tnr", q_TNH, q_GHR.repeat_interleave(SHARED, 0))
    return scores(q_TNR, torch.einsum("tgh,ghr->tgr", k_TGH, k_GHR))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(num_layers=4, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)


@pytest.mark.parametrize("kind", KINDS)
def test_all_columns_keep_all_scores(kind: BasisKind) -> None:
    q_TNH, k_TGH = queries_and_keys()
    torch.testing.assert_close(partial_scores(kind, q_TNH, k_TGH, HEAD_DIM), scores(q_TNH, k_TGH), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_columns_do_not(kind: BasisKind) -> None:
    q_TNH, k_TGH = queries_and_keys()
    assert (partial_scores(kind, q_TNH, k_TGH, 4) - scores(q_TNH, k_TGH)).abs().max() > 1


def test_skewing_is_orthogonal_and_sorts_queries_by_strength() -> None:
    q_GMH = noise(2, 90, HEAD_DIM)
    skew_GHH = skew(q_GMH)
    eye_GHH = torch.eye(HEAD_DIM, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(skew_GHH.mT @ skew_GHH, eye_GHH, atol=1e-13, rtol=0)
    strengths_GH = (q_GMH @ skew_GHH).norm(dim=1)
    torch.testing.assert_close(strengths_GH, torch.linalg.svdvals(q_GMH), atol=1e-9, rtol=0)


def test_a_skew_that_is_folded_before_rope_changes_scores(decoder: Decoder) -> None:
    """Weights that skew queries and keys would do this: a rotation and a change of basis do not commute."""
    table = RotaryTable(decoder.config, torch.device("cpu"), torch.float64)
    rotation = table.lookup(torch.arange(60))
    q_TNH, k_TGH = queries_and_keys()
    turned = apply_rotary(q_TNH, rotation), apply_rotary(k_TGH, rotation)
    true = scores(*turned)
    skew_HH = skew(turned[0].reshape(1, -1, HEAD_DIM))[0]
    behind = scores(turned[0] @ skew_HH, turned[1] @ skew_HH)
    folded = scores(apply_rotary(q_TNH @ skew_HH, rotation), apply_rotary(k_TGH @ skew_HH, rotation))
    assert (behind - true).abs().max() < 1e-10
    assert (folded - true).abs().max() > 0.5 * true.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kv_head_has_one_basis_that_only_its_own_heads_shape(kind: BasisKind) -> None:
    q_TNH, k_TGH = queries_and_keys()
    before = fit_layer(kind, q_TNH, k_TGH, 5)
    q_TNH, k_TGH = q_TNH.clone(), k_TGH.clone()
    q_TNH[:, SHARED:] = noise(60, SHARED, HEAD_DIM, seed=3).flip(-1)
    k_TGH[:, 1:] = noise(60, 1, HEAD_DIM, seed=4).flip(-1)
    after = fit_layer(kind, q_TNH, k_TGH, 5)
    for old_GHR, new_GHR in zip(before, after, strict=True):
        assert old_GHR.shape == (NUM_KV_HEADS, HEAD_DIM, 5)
        assert torch.equal(old_GHR[0], new_GHR[0]) and not torch.equal(old_GHR[1], new_GHR[1])


def test_every_query_head_of_a_kv_head_counts() -> None:
    q_TNH, k_TGH = queries_and_keys()
    louder_TNH = q_TNH.clone()
    louder_TNH[:, SHARED - 1, 0] *= 100
    assert not fit_layer(BasisKind.COLUMNS_Q, q_TNH, k_TGH, 5)[0][0, 0].any()
    assert fit_layer(BasisKind.COLUMNS_Q, louder_TNH, k_TGH, 5)[0][0, 0].any()


@pytest.mark.parametrize(("kind", "with_keys"), [(BasisKind.COLUMNS, True), (BasisKind.COLUMNS_Q, False)])
def test_columns_are_those_of_the_largest_sums(kind: BasisKind, with_keys: bool) -> None:
    q_TNH, k_TGH = queries_and_keys()
    k_TGH *= 20 * torch.rand(HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    q_GHR, k_GHR = fit_layer(kind, q_TNH, k_TGH, 5)
    assert torch.equal(q_GHR, k_GHR)
    for g in range(NUM_KV_HEADS):
        weights = []
        for column in range(HEAD_DIM):
            heads = range(g * SHARED, (g + 1) * SHARED)
            weight = sum(abs(float(q_TNH[t, n, column])) for t in range(60) for n in heads)
            weights.append(weight + with_keys * sum(abs(float(k_TGH[t, g, column])) for t in range(60)))
        best = sorted(range(HEAD_DIM), key=lambda at: -weights[at])[:5]
        assert q_GHR[g].argmax(0).tolist() == best
        assert q_GHR[g].sum() == 5 and set(q_GHR[g].flatten().tolist()) == {0.0, 1.0}


def test_of_equal_columns_the_first_are_taken() -> None:
    ones = torch.ones(20, 1, 4, dtype=torch.float64)
    assert torch.equal(fit_layer(BasisKind.COLUMNS, ones, ones, 2)[0][0], torch.eye(4, dtype=torch.float64)[:, :2])


def test_skewing_finds_a_subspace_that_columns_miss() -> None:
    _, k_TGH = queries_and_keys()
    q_TNH = noise(60, NUM_HEADS, 3) @ noise(3, HEAD_DIM, seed=7)
    true = scores(q_TNH, k_TGH)
    errors = {kind: (partial_scores(kind, q_TNH, k_TGH, 3) - true).abs().max() for kind in KINDS}
    assert errors[BasisKind.SKEW_Q] < 1e-9 < 1 < errors[BasisKind.COLUMNS]


def test_the_centred_basis_is_the_best_of_its_rank_and_blind_to_what_all_keys_share() -> None:
    q_TNH, k_TGH = noise(60, 1, HEAD_DIM, seed=1), noise(60, 1, HEAD_DIM, seed=2)
    centred_TGH = k_TGH - k_TGH.mean(0)
    true = scores(q_TNH, centred_TGH)[0]
    left, strength, right = torch.linalg.svd(true)
    best = (left[:, :5] * strength[:5]) @ right[:5]
    q_GHR, k_GHR = fit_layer(BasisKind.CENTRED, q_TNH, k_TGH, 5)
    torch.testing.assert_close(scores(q_TNH @ q_GHR, centred_TGH @ k_GHR)[0], best, atol=1e-9, rtol=0)
    shifted = fit_layer(BasisKind.CENTRED, q_TNH, k_TGH + 50, 5)
    assert (shifted[0].abs() - q_GHR.abs()).abs().max() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_directions_that_the_sample_never_takes_stay_finite(kind: BasisKind) -> None:
    q_TNH, k_TGH = queries_and_keys()
    q_TNH[..., 3], k_TGH[..., 3] = 0, 0
    assert all(part.isfinite().all() for part in fit_layer(kind, q_TNH, k_TGH, HEAD_DIM))
    assert all(part.isfinite().all() for part in fit_layer(kind, 0 * q_TNH, 0 * k_TGH, 3))


def test_a_spread_sample_is_what_the_model_makes_at_later_places(decoder: Decoder) -> None:
    table = RotaryTable(decoder.config, torch.device("cpu"), torch.float32)
    x_TNH = noise(40, 3, HEAD_DIM).float()
    spread_XNH = spread(table, apply_rotary(x_TNH, table.lookup(torch.arange(40))), CONTEXT, 0)
    assert len(spread_XNH) == NUM_PLACES * 40
    for place, first in enumerate((0, 54, 108, 162, CONTEXT - 40)):
        expected_TNH = apply_rotary(x_TNH, table.lookup(torch.arange(first, first + 40)))
        torch.testing.assert_close(spread_XNH[place * 40 : (place + 1) * 40], expected_TNH, atol=1e-4, rtol=0)


def test_a_model_that_does_not_turn_has_the_same_sample_everywhere() -> None:
    x_TNH = noise(4, 3, HEAD_DIM)
    assert torch.equal(spread(LearnedTable(torch.zeros(9, 4)), x_TNH, 9, 0), x_TNH.repeat(NUM_PLACES, 1, 1))


def test_samples_are_what_attention_compares(decoder: Decoder) -> None:
    """Keys as a forward stores them; queries, and those predicted a layer early, by the definition of a layer."""
    token_ids = [5 * t % 97 for t in range(30)]
    tokens = TokenRange(0, 30)
    buffer = KvBuffer(decoder.layout, tokens)
    inputs = Inputs()
    with torch.inference_mode():
        decoder.forward(token_ids, [BufferSpan(buffer, tokens)], inputs)
        samples = list(sample_layers(decoder, token_ids))
    assert [sample.layer for sample in samples] == list(range(NUM_WHOLE_LAYERS, 4))
    for sample in samples:
        torch.testing.assert_close(sample.k_TGH, buffer.rows(sample.layer, tokens).k_SGH)
        for got_TNH, source in ((sample.q_TNH, sample.layer), (sample.early_TNH, sample.layer - 1)):
            torch.testing.assert_close(got_TNH, queries_of(decoder, sample.layer, inputs.hidden[source]))
        assert (sample.q_TNH - sample.early_TNH).abs().max() > 0.1


def queries_of(decoder: Decoder, layer: int, hidden_TD: Tensor) -> Tensor:
    parts = decoder.weights.layers[layer]
    qkv_TX = parts.qkv(parts.attention_norm(hidden_TD))
    q_TNH = qkv_TX[:, : NUM_HEADS * HEAD_DIM].reshape(-1, NUM_HEADS, HEAD_DIM)
    table = RotaryTable(decoder.config, torch.device("cpu"), torch.float32)
    return apply_rotary(q_TNH, table.lookup(torch.arange(len(hidden_TD))))


class Inputs:
    """LayerTurns that keep what each layer ran on."""

    def __init__(self) -> None:
        self.hidden: list[Tensor] = []

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        self.hidden.append(hidden_TD.clone())

    def picks(self, layer: int, q_TNH: Tensor) -> None:
        return None

    def end(self, layer: int) -> None:
        pass


def test_a_basis_covers_the_layers_that_select_and_makes_partial_queries_and_keys(decoder: Decoder) -> None:
    with torch.inference_mode():
        samples = list(sample_layers(decoder, range(40)))
        bases = fit_bases(decoder, samples, KINDS, num_columns=5, context=CONTEXT)
    assert list(bases) == KINDS
    for kind, basis in bases.items():
        assert basis.kind is kind and basis.num_columns == 5
        assert not basis.q_LGHR[:NUM_WHOLE_LAYERS].any() and not basis.k_LGHR[:NUM_WHOLE_LAYERS].any()
        layer, sample = 3, samples[-1]
        q_TNR, k_TGR = basis.queries(layer, sample.q_TNH), basis.keys(layer, sample.k_TGH)
        for t, n, r in ((0, 0, 0), (7, 2, 4), (39, 5, 1)):
            expected = float(sample.q_TNH[t, n] @ basis.q_LGHR[layer, n // SHARED, :, r]) / math.sqrt(HEAD_DIM)
            assert float(q_TNR[t, n, r]) == pytest.approx(expected, abs=1e-5)
        for t, g, r in ((0, 0, 0), (39, 1, 4)):
            expected = float(sample.k_TGH[t, g] @ basis.k_LGHR[layer, g, :, r])
            assert float(k_TGR[t, g, r]) == pytest.approx(expected, abs=1e-5)
        assert q_TNR.dtype == k_TGR.dtype == torch.float32


def test_layers_whose_basis_only_selects_are_known_whatever_the_kind() -> None:
    one_LGHR = torch.eye(4)[:, [2, 0]].repeat(6, 2, 1, 1)
    one_LGHR[0] = 0
    one_LGHR[2, 1, 0, 1] = 2
    one_LGHR[3, 1, 1, 1] = 1
    one_LGHR[4, 1, :3, 1] = torch.tensor([1.0, 1.0, -1.0])
    one_LGHR[5, 1, :, 1] = torch.tensor([math.nan, 1.0, 0.0, 0.0])
    basis = Basis(BasisKind.CENTRED, one_LGHR, one_LGHR)
    columns = [basis.key_projection(layer).columns_GR for layer in range(6)]
    assert columns[1] is not None and columns[1].tolist() == [[2, 0]] * 2
    assert [each is None for each in columns] == [True, False, True, True, True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_selected_columns_are_copied(dtype: torch.dtype) -> None:
    """A NaN in a column that is not selected must not spread."""
    columns_LGHR = torch.eye(HEAD_DIM)[:, [7, 3, 12]].repeat(1, NUM_KV_HEADS, 1, 1)
    k_TGH = noise(9, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    k_TGH[..., 0] = math.nan
    k_TGR = Basis(BasisKind.COLUMNS, columns_LGHR, columns_LGHR).keys(0, k_TGH)
    assert k_TGR.dtype == torch.float32
    assert torch.equal(k_TGR, k_TGH[..., [7, 3, 12]].float())


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_columns_of_a_basis_are_the_basis_of_so_many(decoder: Decoder, kind: BasisKind) -> None:
    with torch.inference_mode():
        samples = list(sample_layers(decoder, range(40)))
        wide, narrow = (
            fit_bases(decoder, samples, [kind], num_columns=num, context=CONTEXT)[kind] for num in (HEAD_DIM, 5)
        )
    assert wide.first(5).kind is kind and wide.first(5).num_columns == 5
    torch.testing.assert_close(wide.first(5).q_LGHR, narrow.q_LGHR)
    torch.testing.assert_close(wide.first(5).k_LGHR, narrow.k_LGHR)
