"""Bases for key selection. A basis consists of matrices that project queries and keys from the H dimensions of a head
to R columns. Attention scores are estimated from these R columns, at a lower cost than from all H dimensions.

InfiniGen (Lee et al., OSDI 2024) predicts from *partial* (projected) queries and keys which keys are important. A basis
has two matrices [H, R] for each layer and kv head: one for queries and one for keys. The product of a partial query and
a partial key approximates the product of the whole query and key. The matrices are applied to queries and keys after
RoPE. They cannot be folded into the weights before RoPE, because RoPE's rotation and a change of basis do not commute.
The model's weights and KV are not changed.

The J query heads of a kv head use the same two matrices, so that a partial key is stored only once.

The distribution of queries and keys after RoPE depends on the position, because RoPE rotates some dimensions slowly,
and these have different means at different positions. A basis that is fitted only to the first thousands of positions
fails at later positions. Therefore each basis is fitted to the sample text as if the text stood at several positions of
the context. The model processes the text once; the resulting queries and keys are then rotated to each position.

`baton prepare` fits bases in fp64, before any request. `selection_file` stores them. Workers only apply them. See
docs/infinigen.md for an overview.

Legend: T tokens, N query heads, G kv heads, J = N / G query heads of a kv head, H head dim, R columns kept, L layers, D
hidden size, P positions of the sample, M = T * J queries that share a kv head.
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
"""Number of layers at the start of the model that attend to all keys, as in the InfiniGen paper. Attention in these
layers is spread over too many keys to omit some."""
NUM_PLACES = 5
"""Number of positions in the context at which the sample text is assumed to begin. To fit a basis, the text's queries
and keys are rotated to each of these positions."""
_DAMPING = 1e-3
"""Smallest singular value that may be used as a divisor, as a fraction of the largest singular value. Smaller singular
values are replaced by this minimum."""


class BasisKind(enum.Enum):
    """Method by which a basis is computed. The value is the method's name on the command line and in files."""

    COLUMNS = "columns"
    """Method that keeps R of a head's H dimensions unchanged. For each dimension, the absolute values in all queries
    and keys are summed. The R dimensions with the largest sums are kept."""
    COLUMNS_Q = "columns_q"
    """Method that keeps R of a head's H dimensions unchanged. For each dimension, the absolute values in all queries
    are summed. The R dimensions with the largest sums are kept."""
    SKEW = "skew"
    """Method of the InfiniGen paper. Queries and keys are multiplied by the right singular vectors of the queries. The
    results have H columns. For each column, the absolute values of all queries and keys are summed. The R columns with
    the largest sums are kept."""
    SKEW_Q = "skew_q"
    """Variant of SKEW in which only the values of queries are summed, not those of keys. The chosen columns are usually
    those of the largest singular values."""
    CENTRED = "centred"
    """Method that approximates all attention scores best with rank R (Eckart and Young), after each query's mean score
    over all keys is subtracted."""


@dataclass(frozen=True)
class LayerSample:
    """Queries and keys of one layer for a sample text, after RoPE, in the decoder's dtype."""

    layer: int
    q_TNH: Tensor
    early_TNH: Tensor
    """Prediction of this layer's queries, made one layer early. It is computed with this layer's norm and weights, but
    from the input of the previous layer."""
    k_TGH: Tensor


@dataclass(frozen=True)
class Basis:
    """Matrices that project one model's queries and keys to R columns, from which attention scores are estimated at a
    low cost. Each layer and kv head has two matrices: one for queries and one for keys. The matrices of the first
    NUM_WHOLE_LAYERS layers are zero, because no keys are selected in these layers. The columns of a matrix are sorted
    by their contribution to the scores, largest first. The first columns alone are therefore a valid smaller basis."""

    kind: BasisKind
    q_LGHR: Tensor
    """Matrices that project queries, in fp32, `[L, G, H, R]`."""
    k_LGHR: Tensor
    """Matrices that project keys, in fp32, `[L, G, H, R]`."""

    @property
    def num_columns(self) -> int:
        """Number of columns (R) to which the basis projects queries and keys."""
        return self.q_LGHR.shape[-1]

    def first(self, num_columns: int) -> "Basis":
        """Return a smaller basis, which has only the first `num_columns` columns."""
        return Basis(self.kind, self.q_LGHR[..., :num_columns], self.k_LGHR[..., :num_columns])

    def to(self, device: torch.device) -> "Basis":
        """Return a copy of the basis with its matrices on `device`."""
        return Basis(self.kind, self.q_LGHR.to(device), self.k_LGHR.to(device))

    def queries(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return the partial (projected) queries `[T, N, R]` of a layer, in fp32, scaled by 1 / sqrt(H). Their products
        with partial keys approximate the attention scores before softmax."""
        num_tokens, num_heads, head_dim = q_TNH.shape
        partial_GMR = _by_kv_head(q_TNH.float(), self.q_LGHR.shape[1]) @ self.q_LGHR[layer]
        partial_GTJR = partial_GMR.view(len(partial_GMR), num_tokens, -1, self.num_columns).mul_(head_dim**-0.5)
        return partial_GTJR.transpose(0, 1).reshape(num_tokens, num_heads, -1)

    def keys(self, layer: int, k_TGH: Tensor) -> Tensor:
        """Return the partial (projected) keys `[T, G, R]` of a layer, in fp32."""
        return self.key_projection(layer).apply(k_TGH)

    def key_projection(self, layer: int) -> KeyProjection:
        """Return the projection that computes the partial keys of a layer from its keys."""
        return self._key_projections[layer]

    @functools.cached_property
    def _key_projections(self) -> list[KeyProjection]:
        return [KeyProjection.of(k_GHR) for k_GHR in self.k_LGHR]


def sample_layers(decoder: Decoder, token_ids: Sequence[int]) -> Iterator[LayerSample]:
    """Run the model on one sequence, and yield the queries and keys of each layer after the first NUM_WHOLE_LAYERS.
    Must be used in torch.inference_mode()."""
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
    """Fit bases (projections of queries and keys to `num_columns` columns) to `samples` of `decoder`. Return one basis
    for each method in `kinds`. Each basis is fitted for positions below `context`."""
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
    """Rotate the queries or keys of a text as if the text began at other positions. There are NUM_PLACES start
    positions, evenly spaced, so that the first copy begins with the context and the last copy ends with it.

    `x_TNH` holds the queries or keys of the text's T tokens in `layer`. Returns `[NUM_PLACES * T, N, H]`. If the model
    does not use RoPE, the input is only repeated.
    """
    num_tokens = len(x_TNH)
    assert num_tokens <= context, f"{num_tokens} tokens in a context of {context}"
    first_P = torch.linspace(0, context - num_tokens, NUM_PLACES).long()
    places = positions.lookup(first_P.repeat_interleave(num_tokens))
    return places.turn(x_TNH.repeat(NUM_PLACES, 1, 1), layer)


def fit_layer(kind: BasisKind, q_TNH: Tensor, k_TGH: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Fit a basis to the queries and keys of one layer after RoPE. Return the matrices that project queries, and those
    that project keys, each `[G, H, R]` in fp64."""
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
    """Return the orthogonal matrices `[G, H, H]` of the InfiniGen paper: the right singular vectors of the queries,
    beginning with the largest singular value. If queries and keys are both multiplied by these matrices, the products
    of queries and keys do not change."""
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
