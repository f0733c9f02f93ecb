"""Selects the keys to which the sequences of a step attend, by partial keys, as in InfiniGen (Lee et al., OSDI 2024,
section 4.3).

A partial key has R columns instead of the whole width of a head. The product of a partial query and a partial key
approximates the key's score, and is computed from fewer bytes. The columns are defined by a basis from
`baton.modeling.sparse.bases`.

For a sequence of S keys, let q_h be the partial query of head h, and k_g[j] the partial key j of kv head g. J query
heads share a kv head. Then:

    s_h[j] = q_h . k_g[j]                                       score of key j for head h
    S_g[j] = max over the heads h of g of (s_h[j] - max over keys of s_h)        at most 0
    c_g    = number of keys with S_g[j] > -alpha: close enough to the best key of some head
    n      = ceil(mean of c_g over all g), at most max(floor(most_share * tokens), free_keys), and at least 1

Each kv head selects the n keys with the largest S_g. Of two keys with equal S_g, the earlier one is selected. In
addition, all kv heads select the first and the latest keys.

If some keys were evicted, a sequence has more tokens than keys. The bound on n depends on the number of tokens. Each
sequence has its own n, whereas the paper uses one n for a whole batch. The keys of a sequence therefore do not depend
on other sequences.

`generate_workers.residency.sparse.infinigen` calls `PartialRows.select` on the engine's thread. Partial keys are
written on the thread that writes the KV. Supports CPU memory only.

Shape letters: B sequences of one new token, T tokens, N heads, G kv heads, J = N / G, H head dim, R columns, L layers,
S keys, P keys that have partial keys, at most K selected keys, C blocks of I = 16 keys, X lists of selected keys.
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
"""Number of keys of a block. Within a block, partial keys are stored column by column."""
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Picks:
    """Selected keys of the sequences of a step, in one layer. Keys are numbered from 0 within their sequence."""

    keys_BGK: Tensor
    """Selected keys of each sequence and kv head, in ascending order, int32, contiguous. Entries beyond the end of a
    list are undefined."""
    num_BG: Tensor
    """Number of selected keys of each sequence and kv head, at least one, int32, contiguous."""


@dataclass(frozen=True)
class StepPicks:
    """Selected keys of the sequences of a step, in all layers. They are known before the step. Keys are numbered from 0
    within their sequence."""

    keys_LBGK: Tensor
    """Selected keys of each layer, sequence and kv head, in ascending order, int32, contiguous. Entries beyond the end
    of a list are undefined."""
    num_BG: Tensor
    """Number of selected keys of each sequence and kv head, at least one, int32, contiguous. It is the same in all
    layers."""

    def of_layer(self, layer: int) -> Picks:
        """Return the selected keys of one layer."""
        return Picks(self.keys_LBGK[layer], self.num_BG)


@dataclass(frozen=True)
class Selection:
    """Parameters that determine how many keys are selected. Raises ConfigError if a field is outside its limits."""

    alpha: float
    """Maximum distance, in scaled scores, between a key's score and the best score of the same head (above 0). The
    number of keys within this distance determines how many keys are selected. Infinity: all keys are within it."""
    most_share: float
    """Maximum number of keys selected by score, as a fraction of the sequence's tokens (above 0, at most 1). 1: no
    limit."""
    num_first: int
    """Number of the sequence's first keys that are always selected (>= 0), because models concentrate attention on
    them."""
    num_last: int
    """Number of the sequence's latest keys that are always selected (>= 1), including the key of the new token."""
    free_keys: int = 1
    """Lower bound (>= 1) of the maximum that `most_share` sets, as a number of keys. It matters for short sequences, in
    which the fraction `most_share` is a smaller number of keys."""

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
    """Projection from keys to partial keys in one layer. A partial key is a key that is reduced to fewer columns, for
    estimating scores."""

    basis_GHR: Tensor
    """Matrix `[H, R]` of each kv head (its basis), fp32. A partial key is the product of a key and this matrix."""
    columns_GR: Tensor | None
    """Indices of a key's columns that make up its partial key, for each kv head, int64. None if the matrices do more
    than select columns."""

    @classmethod
    def of(cls, basis_GHR: Tensor) -> "KeyProjection":
        """Return the projection that multiplies keys by `basis_GHR`. Sets `columns_GR` if the matrices only select
        columns."""
        selects = bool((basis_GHR.count_nonzero(1) == 1).all() and (basis_GHR.sum(1) == 1).all())
        return cls(basis_GHR, basis_GHR.argmax(1) if selects else None)

    def apply(self, k_TGH: Tensor) -> Tensor:
        """Compute the partial keys of tokens with torch's operations. Return them as `[T, G, R]` in fp32."""
        if self.columns_GR is not None:
            return k_TGH.gather(2, self.columns_GR.expand(len(k_TGH), -1, -1)).float()
        return (k_TGH.float().transpose(0, 1) @ self.basis_GHR).transpose(0, 1).contiguous()


class PartialKeys:
    """Partial keys (keys reduced to fewer columns) of the sequence in a slot, for some layers, in bf16. Memory pages
    are committed when they are written. Each layer is stored as `[C, G, R, I]`: C blocks of I keys, G kv heads, R
    columns. Within a block, the keys are stored column by column. Not thread-safe."""

    def __init__(
        self,
        layers: range,
        num_kv_heads: int,
        num_columns: int,
        max_tokens: int,
        make_memory: Callable[[KvLayout, int], RowMemory] = PagedMemory,
    ) -> None:
        """Reserve address space for the partial keys (keys reduced to `num_columns` columns) of up to `max_tokens`
        tokens. Raises OSError if it cannot be reserved.

        `layers`: layers of the model that have partial keys. `make_memory(layout, max_tokens)`: allocates CPU memory
        that the computation reads.
        """
        self.layers = layers
        # In the layout of KV, a block stands for a token: K and V together hold G heads of 16 R numbers.
        layout = KvLayout("", len(layers), num_kv_heads, num_columns * _BLOCK // 2, "bfloat16")
        self._memory = make_memory(layout, _num_blocks(max_tokens))
        data_LS2GH = self._memory.data_LS2GH
        layer_stride, block_stride = data_LS2GH.stride()[:2]
        shape = (len(layers), data_LS2GH.shape[1], num_kv_heads, num_columns, _BLOCK)
        strides = (layer_stride, block_stride, num_columns * _BLOCK, _BLOCK, 1)
        self.data_LCGRI = data_LS2GH.as_strided(shape, strides)
        """Memory of all partial keys. The model's layer l has index l - layers.start. Only committed memory may be
        accessed."""
        self._unchanged = KeyProjection.of(torch.eye(num_columns).repeat(num_kv_heads, 1, 1))

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that are committed now. It is a multiple of the page size."""
        return self._memory.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes that the partial keys of `num_tokens` tokens occupy once all of them are
        written."""
        return self._memory.bytes_for(_num_blocks(num_tokens))

    def address(self, layer: int) -> int:
        """Return the memory address at which the partial keys of `layer` begin."""
        return self.data_LCGRI.data_ptr() + (layer - self.layers.start) * self.data_LCGRI.stride(0) * _DTYPE.itemsize

    def expect(self, num_tokens: int) -> None:
        """Announce that the partial keys of `num_tokens` tokens will certainly be written, so that memory can be
        prepared for them. Call it at most once between two calls of `release`."""
        self._memory.expect(num_tokens // _BLOCK)

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        """Commit memory for the partial keys of `tokens` in `layer`, before they are written. `layer` None: in all
        layers. A call for all layers is allowed only if memory for all earlier tokens has been committed in every
        layer."""
        blocks = TokenRange(tokens.start // _BLOCK, _num_blocks(tokens.end))
        self._memory.commit(blocks, None if layer is None else self.layers.index(layer))

    def write(self, layer: int, first: int, k_TGH: Tensor, projection: KeyProjection | None = None) -> None:
        """Compute the partial keys (keys reduced to fewer columns) of consecutive tokens and store them, rounded to
        bf16. `first` is the index of the first of these tokens in the sequence.

        `k_TGH` contains the tokens' keys in bf16 or fp32. Each head must be contiguous. `projection` None: `k_TGH`
        contains partial keys already. Raises RuntimeError if the shape of the keys or of the projection is wrong.

        The native kernel runs on the calling thread only, without the GIL. A projection that only selects columns gives
        the same result as with torch. For other projections, the order of the fp32 sums differs from torch's. The
        results may then differ by one step of bf16, and by the rounding error of fp32 if a sum nearly cancels.
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
        """Return `projection` after checking its shape. If it is None, return the projection that leaves keys
        unchanged. Raises RuntimeError if the projection and the partial keys differ in the number of kv heads or of
        columns."""
        found = projection or self._unchanged
        num_kv_heads, _, num_columns = found.basis_GHR.shape
        kept_heads, kept_columns = self.data_LCGRI.shape[2:4]
        if (num_kv_heads, num_columns) != (kept_heads, kept_columns):
            made = f"{num_kv_heads} kv heads and {num_columns} columns"
            raise RuntimeError(f"the basis has {made}, the partial keys have {kept_heads} and {kept_columns}")
        return found

    def read(self, layer: int, num_keys: int) -> Tensor:
        """Return a copy of the first `num_keys` partial keys (keys reduced to fewer columns) of a layer, `[S, G, R]` in
        bf16."""
        data_CGRI = self.data_LCGRI[self.layers.index(layer), : _num_blocks(num_keys)]
        return data_CGRI.permute(0, 3, 1, 2).flatten(0, 1)[:num_keys]

    def copy_from(self, other: "PartialKeys", num_tokens: int) -> None:
        """Copy the partial keys of the first `num_tokens` tokens of another sequence."""
        self.commit(TokenRange(0, num_tokens))
        blocks = slice(0, _num_blocks(num_tokens))
        self.data_LCGRI[:, blocks] = other.data_LCGRI[:, blocks]

    def release(self) -> None:
        """Free all memory. Idempotent."""
        self._memory.release()


class PartialRows:
    """Partial keys (keys reduced to fewer columns) of the sequences of a step. Each sequence has one new token. The
    object stores memory addresses, so it must not be used after the PartialKeys are freed."""

    def __init__(
        self, keys: Sequence[PartialKeys], lengths: Sequence[int], num_tokens: Sequence[int] | None = None
    ) -> None:
        """Collect the addresses of the partial keys, and commit memory for the partial keys of the new tokens in all
        layers.

        `keys`: partial keys of each sequence. All must have the same layers. `lengths`: number of keys of each
        sequence, including the key of the new token. `num_tokens`: number of tokens of each sequence. None: equal to
        `lengths`. It is required if keys of some sequences were evicted.
        """
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
        """Return the memory address at which the partial keys of each sequence begin in `layer`."""
        return self._addresses[self.layers.index(layer)]

    def append(self, layer: int, k_BGH: Tensor, projection: KeyProjection | None = None) -> None:
        """Compute the partial keys (keys reduced to fewer columns) of the new tokens and store them, rounded to bf16.
        `projection` None: `k_BGH` contains partial keys already."""
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
        """Select the keys to which the sequences attend in `layer`. Raises RuntimeError for queries of a wrong shape.

        `q_BNR`: partial queries in fp32, multiplied by 1 / sqrt(H), so that the scores are those of the softmax. A
        score that is NaN counts as smaller than any number.

        `has_new`: True if the partial keys of the new tokens have been written. The new tokens' keys are selected in
        either case.

        `closeness_BGS`: optional output in fp32. It receives S_g (see the module's docstring) of every key that has a
        partial key. Its other entries are not changed.
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
        """Select keys as `select` does, but with torch's operations and one sequence after another. This slow method is
        the fallback if no native kernels are loaded."""
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
