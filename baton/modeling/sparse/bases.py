"""Bases in which queries and keys are compared at a lower cost: R columns instead of a head's whole width.

InfiniGen (Lee et al., OSDI 2024) predicts from *partial* queries and keys which keys matter. A basis defines these: for
each layer and kv head two matrices [H, R], so that q_R . k_R approximates q_H . k_H. Both are applied to the queries
and keys that attention compares, that is, after RoPE. A rotation by the token's position does not commute with a change
of basis, so that a basis folded into the weights before RoPE would change the scores. Weights and KV are not changed.

A kv head has one basis, which its J query heads share, so that a partial key is stored once.

The distribution of a head's queries and keys after RoPE depends on their positions, because columns that rotate slowly
have another mean at other positions. A basis that is fitted to the first thousands of positions fails beyond them. So a
sample is fitted as if it were at several places of the whole context, for which it only has to be rotated.

`baton prepare` fits bases, in fp64, before any request. `selection_file` stores them, and workers only apply them.
docs/infinigen.md has the overview.

Legend: T tokens, N query heads, G kv heads, J = N / G, H head dim, R columns kept, L layers, D hidden, P places of a
sample, M = T * J queries that share a kv head.
"""

import enum
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.positions import PositionTable
from baton.modeling.forward.selection import KeyProjection
from baton.modeling.kv.buffers import BufferSpan
from baton.types import TokenRange

NUM_WHOLE_LAYERS = 2
"""Number of first layers that attend to all keys, as in the paper: their attention is too spread out to omit many."""
NUM_PLACES = 5
"""Number of places within the context at which a sample is fitted."""
_DAMPING = 1e-3
"""Minimum singular value by which is divided, as a fraction of the largest. Smaller values are raised to it."""


class BasisKind(enum.Enum):
    """Method that finds a basis. The value is its name on the command line and in files."""

    COLUMNS = "columns"
    """Columns of the head itself with the largest sum over tokens of |q| and |k|."""
    COLUMNS_Q = "columns_q"
    """Columns of the head itself with the largest sum over tokens of |q| only."""
    SKEW = "skew"
    """Paper's method: the queries' right singular vectors, then the columns with the largest sum of |q~| and |k~|."""
    SKEW_Q = "skew_q"
    """Queries' right singular vectors, then the columns with the largest sum of |q~| only: the first vectors."""
    CENTRED = "centred"
    """Best approximation of all scores, minus their mean over keys, by a product of rank R (Eckart and Young)."""


@dataclass(frozen=True)
class LayerSample:
    """Queries and keys that attention compares in one layer, on some text, in the decoder's dtype."""

    layer: int
    q_TNH: Tensor
    early_TNH: Tensor
    """Queries of the layer, predicted one layer early: computed with its norm and weights from the input of the
    previous layer."""
    k_TGH: Tensor


@dataclass(frozen=True)
class Basis:
    """Basis of one model, in all layers and kv heads. The first NUM_WHOLE_LAYERS layers are zeros, because no keys are
    selected there. Columns that contribute most to the scores come first, so that the first columns are a basis too."""

    kind: BasisKind
    q_LGHR: Tensor
    """Matrices for queries, in fp32."""
    k_LGHR: Tensor
    """Matrices for keys, in fp32."""

    @property
    def num_columns(self) -> int:
        """Return R, the number of columns."""
        return self.q_LGHR.shape[-1]

    def first(self, num_columns: int) -> "Basis":
        """Return the basis of the first `num_columns` columns."""
        return Basis(self.kind, self.q_LGHR[..., :num_columns], self.k_LGHR[..., :num_columns])

    def to(self, device: torch.device) -> "Basis":
        """Return the basis with its matrices on a device."""
        return Basis(self.kind, self.q_LGHR.to(device), self.k_LGHR.to(device))

    def queries(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return partial queries `[T, N, R]` in fp32, times 1 / sqrt(H). Their products are scores for a softmax."""
        num_tokens, num_heads, head_dim = q_TNH.shape
        partial_GMR = _by_kv_head(q_TNH.float(), self.q_LGHR.shape[1]) @ self.q_LGHR[layer]
        partial_GTJR = partial_GMR.view(len(partial_GMR), num_tokens, -1, self.num_columns).mul_(head_dim**-0.5)
        return partial_GTJR.transpose(0, 1).reshape(num_tokens, num_heads, -1)

    def keys(self, layer: int, k_TGH: Tensor) -> Tensor:
        """Return partial keys `[T, G, R]` in fp32."""
        return self.key_projection(layer).apply(k_TGH)

    def key_projection(self, layer: int) -> KeyProjection:
        """Return the projection that makes a layer's partial keys."""
        return self._key_projections[layer]

    @functools.cached_property
    def _key_projections(self) -> list[KeyProjection]:
        return [KeyProjection.of(k_GHR) for k_GHR in self.k_LGHR]


def sample_layers(decoder: Decoder, token_ids: Sequence[int]) -> Iterator[LayerSample]:
    """Run one sequence, and yield a sample of each layer after the first NUM_WHOLE_LAYERS. To be used in
    torch.inference_mode()."""
    tokens = TokenRange(0, len(token_ids))
    buffer = decoder.device.buffer(decoder.layout, tokens)
    step = decoder.begin([BufferSpan(buffer, tokens)])
    hidden_TD = decoder.embed(token_ids, step)
    early_TNH: Tensor | None = None
    for layer in range(decoder.config.num_layers):
        q_TNH = decoder.project(layer, hidden_TD, step)
        rows = buffer.rows(layer, tokens)
        if layer >= NUM_WHOLE_LAYERS:
            assert early_TNH is not None
            yield LayerSample(layer, q_TNH, early_TNH, rows.k_SGH)
        if layer + 1 < decoder.config.num_layers:  # the next iteration overwrites the keys that this writes
            early_TNH = decoder.project(layer + 1, hidden_TD, step)
        attention = decoder.attention(layer, q_TNH, 0)
        attention.add(rows)
        hidden_TD = decoder.complete(layer, hidden_TD, attention.result())


def fit_bases(
    decoder: Decoder, samples: Iterable[LayerSample], kinds: Sequence[BasisKind], *, num_columns: int, context: int
) -> dict[BasisKind, Basis]:
    """Fit a basis of each kind with `num_columns` columns to `samples` of `decoder`, for positions below `context`."""
    layout = decoder.layout
    assert 1 <= num_columns <= layout.head_dim, f"{num_columns} of {layout.head_dim} columns"
    shape = (layout.num_layers, layout.num_kv_heads, layout.head_dim, num_columns)
    fitted = {kind: (torch.zeros(shape), torch.zeros(shape)) for kind in kinds}
    for sample in samples:
        positions, layer = decoder.weights.positions, sample.layer
        q_TNH, k_TGH = (spread(positions, x, context, layer) for x in (sample.q_TNH, sample.k_TGH))
        for kind, (q_LGHR, k_LGHR) in fitted.items():
            q_LGHR[sample.layer], k_LGHR[sample.layer] = fit_layer(kind, q_TNH, k_TGH, num_columns)
    return {kind: Basis(kind, q_LGHR, k_LGHR) for kind, (q_LGHR, k_LGHR) in fitted.items()}


def spread(positions: PositionTable, x_TNH: Tensor, context: int, layer: int) -> Tensor:
    """Return queries or keys of a text's T tokens in a layer as if the text were at NUM_PLACES places from the
    context's start to its end: `[NUM_PLACES * T, N, H]`. If the model does not use RoPE, they are only repeated."""
    num_tokens = len(x_TNH)
    assert num_tokens <= context, f"{num_tokens} tokens in a context of {context}"
    first_P = torch.linspace(0, context - num_tokens, NUM_PLACES).long()
    places = positions.lookup(first_P.repeat_interleave(num_tokens))
    return places.turn(x_TNH.repeat(NUM_PLACES, 1, 1), layer)


def fit_layer(kind: BasisKind, q_TNH: Tensor, k_TGH: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return `(q_GHR, k_GHR)` in fp64, fitted to one layer's queries and keys after RoPE."""
    q_GMH = _by_kv_head(q_TNH.double().cpu(), k_TGH.shape[1])
    k_GTH = k_TGH.double().cpu().transpose(0, 1)
    if kind is BasisKind.CENTRED:
        return _eckart_young(q_GMH, k_GTH, num_columns)
    num_kv_heads, _, head_dim = k_GTH.shape
    if kind in (BasisKind.COLUMNS, BasisKind.COLUMNS_Q):
        whole_GHH = torch.eye(head_dim, dtype=torch.float64).expand(num_kv_heads, -1, -1)
    else:
        whole_GHH = skew(q_GMH)
    weight_GH = (q_GMH @ whole_GHH).abs().sum(1)
    if kind in (BasisKind.COLUMNS, BasisKind.SKEW):
        weight_GH = weight_GH + (k_GTH @ whole_GHH).abs().sum(1)
    basis_GHR = _heaviest(whole_GHH, weight_GH, num_columns)
    return basis_GHR, basis_GHR


def skew(q_GMH: Tensor) -> Tensor:
    """Return the paper's orthogonal matrices `[G, H, H]`: the queries' right singular vectors, the strongest first.
    Queries and keys, both multiplied by them, have the same products as before."""
    return _singular(q_GMH)[1]


def _singular(x_GMH: Tensor) -> tuple[Tensor, Tensor]:
    """Return singular values `[G, H]`, descending, and right singular vectors `[G, H, H]`, as columns. They are
    computed from X'X: the precision that squaring loses in fp64 is far below a sample's noise, and M is far above H."""
    squares_GH, vectors_GHH = torch.linalg.eigh(x_GMH.mT @ x_GMH)
    return squares_GH.flip(1).clamp(min=0).sqrt(), vectors_GHH.flip(2)


def _by_kv_head(q_TNH: Tensor, num_kv_heads: int) -> Tensor:
    """Return `[G, M, H]`: for each kv head, a matrix whose rows are the queries that share the head."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    q_GTJH = q_TNH.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(0, 1)
    return q_GTJH.reshape(num_kv_heads, -1, head_dim)


def _heaviest(whole_GHH: Tensor, weight_GH: Tensor, num_columns: int) -> Tensor:
    """Return the columns with the largest weights, the largest first. Of equal weights the earlier column is first."""
    chosen_GR = weight_GH.sort(dim=1, descending=True, stable=True).indices[:, :num_columns]
    return whole_GHH.gather(2, chosen_GR.unsqueeze(1).expand(-1, whole_GHH.shape[1], -1))


def _eckart_young(q_GMH: Tensor, k_GTH: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return the best rank-R factors of the scores (Eckart and Young, 1936).

    Q = U S V' of the queries, and K = U S V' of the keys minus their mean, which does not change the ranking of keys.
    The products are U_q (S_q V_q' V_k S_k) U_k'. The inner matrix, cut at rank R, is expressed as factors of Q and K.
    """
    sq_GH, vq_GHH = _singular(q_GMH)
    sk_GH, vk_GHH = _singular(k_GTH - k_GTH.mean(1, keepdim=True))
    core_GHH = sq_GH.unsqueeze(2) * (vq_GHH.mT @ vk_GHH) * sk_GH.unsqueeze(1)
    left_GHH, strength_GH, right_GHH = torch.linalg.svd(core_GHH)
    root_G1R = strength_GH[:, None, :num_columns].sqrt()
    q_GHR = vq_GHH @ (left_GHH[:, :, :num_columns] / _damped(sq_GH).unsqueeze(2)) * root_G1R
    k_GHR = vk_GHH @ (right_GHH.mT[:, :, :num_columns] / _damped(sk_GH).unsqueeze(2)) * root_G1R
    return q_GHR, k_GHR


def _damped(singular_GH: Tensor) -> Tensor:
    """Raise small singular values to _DAMPING times the largest. Otherwise rare directions would dominate."""
    return singular_GH.clamp(min=torch.finfo(torch.float64).tiny).maximum(_DAMPING * singular_GH[:, :1])
