"""Selection of the keys that a step's sequences attend to, by partial keys, as in InfiniGen.

A partial key is a key in R columns instead of a head's whole width. Its product with a partial query approximates the
key's score, and less memory is read (InfiniGen; Lee et al., OSDI 2024, section 4.3). The basis of the columns comes
from `baton.modeling.sparse.bases`. In a sequence of S keys, with partial queries q_h and partial keys k_g[j], for a kv
head g of J query heads:

    s_h[j] = q_h . k_g[j]
    S_g[j] = max over the heads h of g of (s_h[j] - max over keys of s_h)
    c_g    = number of keys with S_g[j] > -alpha: they are close enough to the best key of some head
    n      = ceil(mean of c_g over all g), at most max(floor(most_share * tokens), free_keys), and at least 1

Each kv head selects its n largest S_g, and of equal ones the earlier keys. In addition, all kv heads select the first
and the latest keys. A sequence has more tokens than keys if some keys were evicted: the bound on n depends on its
tokens, not on the keys kept. Each sequence has its own n, whereas the paper uses one for a whole batch. So the keys
that a sequence attends to do not depend on other sequences.

`generate_workers.residency.sparse.infinigen` calls `PartialRows.select` on the engine's thread. Partial keys are
written on the thread that writes their KV. Only for the CPU's memory.

B sequences (rows) of one new token, T tokens, N heads, G kv heads, J = N / G, H head dim, R columns, L layers, S keys,
P keys that have partial keys, at most K selected keys, C blocks of I = 16 keys, X lists of selected keys.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.kernels import native
from baton.modeling.kv.row_memory import PagedMemory, RowMemory
from baton.types import KvLayout, TokenRange

_BLOCK = 16
"""Number of keys of a block, which stores them column by column."""
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Picks:
    """Selected keys, to which sequences attend in one layer. Keys are numbered within their sequence, from 0."""

    keys_BGK: Tensor
    """Keys of each kv head, ascending, int32, contiguous. Entries beyond the length of a head's list are
    meaningless."""
    num_BG: Tensor
    """Number of keys in each list, at least one, int32, contiguous."""


@dataclass(frozen=True)
class StepPicks:
    """Selected keys, to which a step's sequences attend in all layers, known before the step. Keys are numbered within
    their sequence, from 0."""

    keys_LBGK: Tensor
    """Keys of each kv head, ascending, int32, contiguous. Entries beyond the length of a head's list are
    meaningless."""
    num_BG: Tensor
    """Number of keys in each list, at least one, int32, contiguous. It is the same in all layers."""

    def of_layer(self, layer: int) -> Picks:
        """Return the selected keys of one layer."""
        return Picks(self.keys_LBGK[layer], self.num_BG)


@dataclass(frozen=True)
class Selection:
    """Parameters of the number of selected keys. Raises ConfigError when a field is out of its limits."""

    alpha: float
    """Maximum distance, in scaled scores, from a head's best key within which a key is counted. Infinity: all keys are
    counted."""
    most_share: float
    """Maximum number of keys selected by score, as a fraction of the sequence's tokens. 1: no limit."""
    num_first: int
    """Number of first keys that are always selected, because models concentrate attention on them."""
    num_last: int
    """Number of latest keys that are always selected, including the new token's own."""
    free_keys: int = 1
    """Number of keys that any sequence may select by score, even if `most_share` allows fewer because the sequence is
    short."""

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ConfigError(f"alpha = {self.alpha} leaves no key to choose: use a number above 0, or inf")
        if not 0 < self.most_share <= 1:
            raise ConfigError(f"most_share = {self.most_share} is out of range: use a number above 0, up to 1")
        if self.num_first < 0:
            raise ConfigError(f"num_first = {self.num_first} is out of range: use 0 or more")
        if self.num_last < 1:
            raise ConfigError(f"num_last = {self.num_last} leaves out the token itself: use 1 or more")
        if self.free_keys < 1:
            raise ConfigError(f"free_keys = {self.free_keys} leaves no key to choose: use 1 or more")

    def most_by_score(self, num_tokens: int) -> int:
        """Return the maximum number of keys that a sequence of `num_tokens` tokens may select by score."""
        return max(self.free_keys, math.floor(self.most_share * num_tokens))


@dataclass(frozen=True)
class KeyProjection:
    """Projection from keys to partial keys, in one layer."""

    basis_GHR: Tensor
    """Basis of each kv head, fp32."""
    columns_GR: Tensor | None
    """Indices of the selected columns of the head, int64, if the basis only selects columns; else None."""

    @classmethod
    def of(cls, basis_GHR: Tensor) -> "KeyProjection":
        """Return the projection of a basis, after checking whether the basis only selects columns."""
        selects = bool((basis_GHR.count_nonzero(1) == 1).all() and (basis_GHR.sum(1) == 1).all())
        return cls(basis_GHR, basis_GHR.argmax(1) if selects else None)

    def apply(self, k_TGH: Tensor) -> Tensor:
        """Return the partial keys `[T, G, R]` in fp32, by torch."""
        if self.columns_GR is not None:
            return k_TGH.gather(2, self.columns_GR.expand(len(k_TGH), -1, -1)).float()
        return (k_TGH.float().transpose(0, 1) @ self.basis_GHR).transpose(0, 1).contiguous()


class PartialKeys:
    """Partial keys of one slot's sequences, in some layers: bf16, in pages that are committed as they are written. A
    layer is stored as `[C, G, R, I]`: for I keys column by column. Not thread-safe."""

    def __init__(
        self,
        layers: range,
        num_kv_heads: int,
        num_columns: int,
        max_tokens: int,
        make_memory: Callable[[KvLayout, int], RowMemory] = PagedMemory,
    ) -> None:
        """`layers`: the model's layers with partial keys. `make_memory`: allocates the CPU's memory that compute reads.
        Raises OSError when the address space cannot be reserved."""
        self.layers = layers
        # In the layout of KV, a block stands for a token: K and V together hold G heads of 16 R numbers.
        layout = KvLayout("", len(layers), num_kv_heads, num_columns * _BLOCK // 2, "bfloat16")
        self._memory = make_memory(layout, _num_blocks(max_tokens))
        data_LS2GH = self._memory.data_LS2GH
        layer_stride, block_stride = data_LS2GH.stride()[:2]
        shape = (len(layers), data_LS2GH.shape[1], num_kv_heads, num_columns, _BLOCK)
        strides = (layer_stride, block_stride, num_columns * _BLOCK, _BLOCK, 1)
        self.data_LCGRI = data_LS2GH.as_strided(shape, strides)
        """All partial keys. The model's layer l is at l - layers.start. Only committed memory may be accessed."""
        self._unchanged = KeyProjection.of(torch.eye(num_columns).repeat(num_kv_heads, 1, 1))

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are committed now, a whole number of pages."""
        return self._memory.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of the partial keys of `num_tokens` tokens, once all are written."""
        return self._memory.bytes_for(_num_blocks(num_tokens))

    def address(self, layer: int) -> int:
        """Return the address of the layer's first block."""
        return self.data_LCGRI.data_ptr() + (layer - self.layers.start) * self.data_LCGRI.stride(0) * _DTYPE.itemsize

    def expect(self, num_tokens: int) -> None:
        """Announce that the partial keys of `num_tokens` tokens will certainly be written. May be called once between
        two releases."""
        self._memory.expect(num_tokens // _BLOCK)

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        """Commit memory for the partial keys of `tokens`, before they are written, in `layer` or in all layers. Calls
        for all layers must have ascending tokens, without a gap after the tokens that were committed for single layers.
        """
        blocks = TokenRange(tokens.start // _BLOCK, _num_blocks(tokens.end))
        self._memory.commit(blocks, None if layer is None else self.layers.index(layer))

    def write(self, layer: int, first: int, k_TGH: Tensor, projection: KeyProjection | None = None) -> None:
        """Compute the partial keys of the tokens from number `first` on, and store them, rounded to bf16. Without a
        projection `k_TGH` are partial keys already. Keys are bf16 or fp32, and each head must be contiguous. Raises
        RuntimeError when the keys, or the projection, have another shape.

        The native kernel runs on the calling thread only, without the GIL. Its selected columns equal torch's. Its
        products are also summed in fp32, but in another order. They may differ by one step of bf16, and by the
        rounding error of fp32 if a sum nearly cancels.
        """
        projection = self.fitting(projection)
        self.commit(TokenRange(first, first + len(k_TGH)), layer)
        if native.load():
            _project(k_TGH, projection, torch.tensor([self.address(layer)]), torch.tensor([first]))
        else:
            data_CGRI = self.data_LCGRI[self.layers.index(layer)]
            places_T = torch.arange(first, first + len(k_TGH))
            data_CGRI[places_T // _BLOCK, :, :, places_T % _BLOCK] = projection.apply(k_TGH).to(_DTYPE)

    def fitting(self, projection: KeyProjection | None) -> KeyProjection:
        """Return the projection, or the identity if it is None. Raises RuntimeError if its number of kv heads or
        columns does not fit."""
        found = projection or self._unchanged
        num_kv_heads, _, num_columns = found.basis_GHR.shape
        kept_heads, kept_columns = self.data_LCGRI.shape[2:4]
        if (num_kv_heads, num_columns) != (kept_heads, kept_columns):
            made = f"{num_kv_heads} kv heads and {num_columns} columns"
            raise RuntimeError(f"the basis has {made}, the partial keys have {kept_heads} and {kept_columns}")
        return found

    def read(self, layer: int, num_keys: int) -> Tensor:
        """Return a copy of the first `num_keys` partial keys, `[S, G, R]` in bf16."""
        data_CGRI = self.data_LCGRI[self.layers.index(layer), : _num_blocks(num_keys)]
        return data_CGRI.permute(0, 3, 1, 2).flatten(0, 1)[:num_keys]

    def copy_from(self, other: "PartialKeys", num_tokens: int) -> None:
        """Copy the partial keys of another sequence's first `num_tokens` tokens."""
        self.commit(TokenRange(0, num_tokens))
        blocks = slice(0, _num_blocks(num_tokens))
        self.data_LCGRI[:, blocks] = other.data_LCGRI[:, blocks]

    def release(self) -> None:
        """Free all memory. Idempotent."""
        self._memory.release()


class PartialRows:
    """Partial keys of a step's sequences of one new token. Holds addresses: the PartialKeys must outlive it."""

    def __init__(
        self, keys: Sequence[PartialKeys], lengths: Sequence[int], num_tokens: Sequence[int] | None = None
    ) -> None:
        """Commit memory for the new tokens' partial keys in all layers. `lengths`: number of keys of each sequence,
        including the new token's key. `num_tokens`: number of tokens of each sequence; needed if some sequences do not
        keep all keys. All `keys` must have the same layers."""
        for each, length in zip(keys, lengths, strict=True):
            each.commit(TokenRange(length - 1, length))
        self.keys = keys
        self.layers = keys[0].layers
        self.lengths_B = torch.tensor(lengths)
        self.tokens_B = self.lengths_B if num_tokens is None else torch.tensor(num_tokens)
        first_B = torch.tensor([each.address(self.layers.start) for each in keys])
        step_B = torch.tensor([each.data_LCGRI.stride(0) * _DTYPE.itemsize for each in keys])
        self._addresses = (first_B + step_B * torch.arange(len(self.layers)).unsqueeze(1)).unbind()

    def addresses_B(self, layer: int) -> Tensor:
        """Return the addresses of the sequences' first blocks in a layer."""
        return self._addresses[self.layers.index(layer)]

    def append(self, layer: int, k_BGH: Tensor, projection: KeyProjection | None = None) -> None:
        """Compute the new tokens' partial keys, and store them, as PartialKeys.write does."""
        if native.load():
            fitting = self.keys[0].fitting(projection)
            _project(k_BGH, fitting, self.addresses_B(layer), self.lengths_B - 1)
        else:
            for keys, length, k_GH in zip(self.keys, self.lengths_B.tolist(), k_BGH, strict=True):
                keys.write(layer, length - 1, k_GH.unsqueeze(0), projection)

    def select(
        self,
        layer: int,
        q_BNR: Tensor,
        selection: Selection,
        *,
        has_new: bool = True,
        closeness_BGS: Tensor | None = None,
    ) -> Picks:
        """Return the keys that the sequences attend to in `layer`. Raises RuntimeError for queries of a wrong shape.

        `q_BNR`: partial queries in fp32, times 1 / sqrt(H), so that scores are those of a softmax. `has_new`: whether
        the new tokens' partial keys are written. The new tokens' keys are selected in either case. A score that is NaN
        counts as less than all numbers. `closeness_BGS`: receives S_g of every key that has a partial key, in fp32.
        Other entries are not changed.
        """
        num_kv_heads, num_columns = self.keys[0].data_LCGRI.shape[2:4]
        if q_BNR.shape[2] != num_columns:
            raise RuntimeError(f"queries have {q_BNR.shape[2]} columns, the partial keys {num_columns}")
        if not native.load():
            return self.select_plainly(layer, q_BNR, selection, has_new=has_new, closeness_BGS=closeness_BGS)
        keys_BGK, num_BG = native.operators().select_keys(
            q_BNR,
            (self.addresses_B(layer), self.lengths_B, self.tokens_B, int(not has_new)),
            num_kv_heads,
            (selection.alpha, selection.most_share, selection.free_keys, selection.num_first, selection.num_last),
            closeness_BGS=closeness_BGS,
        )
        return Picks(keys_BGK, num_BG)

    def select_plainly(
        self,
        layer: int,
        q_BNR: Tensor,
        selection: Selection,
        *,
        has_new: bool = True,
        closeness_BGS: Tensor | None = None,
    ) -> Picks:
        """Select keys as `select` does, with torch and one sequence after another. It is slow, and is the fallback if
        no native kernels are loaded."""
        lists = []
        for row, (keys, length, q_NR) in enumerate(zip(self.keys, self.lengths_B.tolist(), q_BNR, strict=True)):
            num_scored = length - int(not has_new)
            closeness_GP = _closeness(q_NR, keys.read(layer, num_scored).float())
            if closeness_BGS is not None:
                closeness_BGS[row, :, :num_scored] = closeness_GP
            lists += _chosen(closeness_GP, length, selection.most_by_score(int(self.tokens_B[row])), selection)
        num_X = torch.tensor([len(each) for each in lists], dtype=torch.int32)
        keys_XK = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
        num_BG = num_X.view(len(q_BNR), -1)
        return Picks(keys_XK.int().view(*num_BG.shape, -1), num_BG)


def _project(k_TGH: Tensor, projection: KeyProjection, addresses: Tensor, numbers: Tensor) -> None:
    native.operators().project_keys(k_TGH, projection.basis_GHR, projection.columns_GR, addresses, numbers)


def _closeness(q_NR: Tensor, k_PGR: Tensor) -> Tensor:
    """Return S_g[j], `[G, P]`, of the keys that have partial keys."""
    least = torch.finfo(torch.float32).min
    num_kv_heads, num_columns = k_PGR.shape[1:]
    score_GJP = q_NR.view(num_kv_heads, -1, num_columns) @ k_PGR.permute(1, 2, 0)
    if not len(k_PGR):
        return score_GJP.amax(1)
    most_GJ1 = score_GJP.nan_to_num(least, math.inf, least).amax(2, keepdim=True)
    return (score_GJP - most_GJ1).nan_to_num(least, math.inf, least).amax(1)


def _chosen(closeness_GP: Tensor, length: int, most: int, selection: Selection) -> list[Tensor]:
    """Return the selected keys of each kv head, in a sequence of `length` keys. At most `most` keys are selected by
    score."""
    num_kv_heads, num_scored = closeness_GP.shape
    num_close = int((closeness_GP > -selection.alpha).sum())
    num = min(max(-(-num_close // num_kv_heads), 1), most, num_scored)
    is_chosen_GS = torch.zeros(num_kv_heads, length, dtype=torch.bool)
    best_GK = closeness_GP.sort(descending=True, stable=True).indices[:, :num]
    is_chosen_GS.scatter_(1, best_GK, torch.ones_like(best_GK, dtype=torch.bool))
    is_chosen_GS[:, : selection.num_first] = True
    is_chosen_GS[:, min(num_scored, max(length - selection.num_last, 0)) :] = True
    return [is_chosen_S.nonzero().flatten() for is_chosen_S in is_chosen_GS]


def _num_blocks(num_keys: int) -> int:
    return -(-num_keys // _BLOCK)
