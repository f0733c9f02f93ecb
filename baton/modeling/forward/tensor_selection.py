"""Selection of keys by partial keys on a GPU. It implements `selection` with tensor operations whose results the host
never reads.

`selection` defines partial keys, scores and selected keys. The CPU kernels that `selection` calls take addresses in CPU
memory and return lists of any length. In this module, all shapes follow from the lengths of the sequences, which the
host knows. Entries beyond the keys of a sequence are masked. No call therefore waits for the device.

The order of sums differs from that on a CPU, so two keys with nearly equal scores may be ranked differently.

Shape letters: B sequences of one new token, T tokens, N heads, G kv heads, J = N / G, H head dim, R columns, L layers,
P pages of a pool, each for a whole sequence, S keys, at most K selected keys, X entries.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.modeling.forward.selection import KeyProjection, Picks, Selection
from baton.modeling.kv.pages import PagePool
from baton.modeling.kv.pool_rows import PoolRow
from baton.types import KvLayout

_BLOCK = 16
"""Number of partial keys in a block. The pool's KV layout is chosen so that a block fills the memory of one token: its
K and V together."""
_LIST_BYTES = 64
"""Number of temporary bytes per key and kv head for the lists that a selection sorts, masks and packs."""
_LEAST = torch.finfo(torch.float32).min


def partial_layout(layers: range, num_kv_heads: int, num_columns: int) -> KvLayout:
    """Return the KV layout of a pool for partial keys (keys reduced to `num_columns` columns). In this layout, the
    memory of one token (K and V together) holds a block: 16 partial keys of each kv head. `partial_blocks` returns the
    number of blocks that a sequence needs."""
    return KvLayout("", len(layers), num_kv_heads, num_columns * _BLOCK // 2, "bfloat16")


def partial_blocks(num_tokens: int) -> int:
    """Return the number of blocks (16 partial keys each) that `num_tokens` tokens need."""
    return -(-num_tokens // _BLOCK)


def selecting_bytes(num_heads: int, num_kv_heads: int, num_columns: int) -> int:
    """Return the maximum number of temporary bytes that selection needs in one layer, per key of a sequence. They are
    used for copies of the partial key in bf16 and fp32, scores, and integer lists."""
    return num_kv_heads * (6 * num_columns + _LIST_BYTES) + 8 * num_heads


class TensorPartialKeys:
    """Partial keys (keys reduced to fewer columns) of the sequence in a slot, for some layers, in bf16. They are stored
    in one page of a pool on the GPU. Not thread-safe."""

    def __init__(self, layers: range, num_kv_heads: int, num_columns: int, pool: PagePool) -> None:
        """Create the partial keys of a slot without allocating a page. The layout of `pool` must be the result of
        `partial_layout`. A page must hold all blocks of the longest sequence. The number of tokens per page must
        therefore be at least `partial_blocks` of the maximum sequence length, because a block takes one token's
        memory."""
        self.layers = layers
        self.memory = PoolRow(pool)
        data = pool.memory.data_LPS2GH
        num_keys = data.shape[2] * _BLOCK
        self.pool_LPGSR = data.view(len(layers), data.shape[1], num_kv_heads, num_keys, num_columns)
        """Partial keys (keys reduced to fewer columns) in all pages of the pool, by layer, page, kv head, key and
        column. The model's layer l has index l - layers.start."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that the sequence's partial keys occupy now."""
        return self.memory.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes that the partial keys of a sequence of `num_tokens` tokens occupy: the size of one
        page, or 0 if `num_tokens` is 0."""
        return self.memory.bytes_for(num_tokens)

    def expect(self, num_tokens: int) -> None:
        """Allocate the page of the pool in which the sequence's partial keys are stored. One page has room for
        any number of tokens, so `num_tokens` has no effect. Raises MemoryError if no page is free."""
        self.memory.expect(num_tokens)

    def write(self, layer: int, first: int, k_TGH: Tensor, projection: KeyProjection) -> None:
        """Compute the partial keys (keys reduced to fewer columns) of consecutive tokens and store them, rounded to
        bf16. `first` is the index of the first of these tokens in the sequence."""
        row_GSR = self.pool_LPGSR[self.layers.index(layer), self.memory.number]
        row_GSR[:, first : first + len(k_TGH)] = projection.apply(k_TGH).transpose(0, 1)

    def copy_from(self, other: "TensorPartialKeys", num_tokens: int) -> None:
        """Copy the partial keys of the first `num_tokens` tokens of another sequence."""
        source_LGSR = self.pool_LPGSR[:, other.memory.number, :, :num_tokens]
        self.pool_LPGSR[:, self.memory.number, :, :num_tokens] = source_LGSR

    def release(self) -> None:
        """Release the page of the sequence's partial keys. Idempotent."""
        self.memory.release()


class TensorPartialRows:
    """Partial keys (keys reduced to fewer columns) of the sequences of a step, on a GPU. Each sequence has one new
    token. Page indices and lengths are copied to the device when the object is created."""

    def __init__(self, keys: Sequence[TensorPartialKeys], lengths: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Create the object for sequences with these partial keys. `lengths`: number of keys of each sequence,
        including the key of the new token. `num_tokens`: number of tokens of each sequence. It limits the number of
        selected keys."""
        self._keys = keys[0]
        where = self._keys.pool_LPGSR.device
        self._lengths, self._num_tokens = lengths, num_tokens
        self._rows_B = torch.tensor([each.memory.number for each in keys], device=where)
        self._lengths_B = torch.tensor(lengths, device=where)
        self._most_B = torch.empty(0)
        self._selection: Selection | None = None

    def append(self, layer: int, k_BGH: Tensor, projection: KeyProjection) -> None:
        """Compute the partial keys (keys reduced to fewer columns) of the new tokens and store them, rounded to
        bf16."""
        pool_PGSR = self._keys.pool_LPGSR[self._keys.layers.index(layer)]
        pool_PGSR[self._rows_B, :, self._lengths_B - 1] = projection.apply(k_BGH).to(pool_PGSR.dtype)

    def select(
        self,
        layer: int,
        q_BNR: Tensor,
        selection: Selection,
        *,
        has_new: bool,
        closeness_BGS: Tensor | None = None,
    ) -> Picks:
        """Return the keys to which the sequences attend in `layer`. `q_BNR`: partial queries in fp32, multiplied by
        1 / sqrt(H). `has_new`: True if the partial keys of the new tokens have been written. `closeness_BGS` is not
        supported and must be None."""
        assert closeness_BGS is None, "pools are the CPU's"
        most = self._bounds(selection)
        num_keys = max(self._lengths)
        pool_PGSR = self._keys.pool_LPGSR[self._keys.layers.index(layer)]
        k_BGSR = pool_PGSR[:, :, :num_keys].index_select(0, self._rows_B)
        key_S = torch.arange(num_keys, device=k_BGSR.device)
        num_scored_B11 = (self._lengths_B - int(not has_new)).view(-1, 1, 1)
        closeness_BGS = _closeness(q_BNR, k_BGSR, key_S < num_scored_B11)
        return self._chosen(closeness_BGS, num_scored_B11, key_S, selection, most)

    def _bounds(self, selection: Selection) -> int:
        """Copy the maximum number of keys that each sequence may select by score to the device, once per step. Return
        the largest of these numbers."""
        most = [selection.most_by_score(each) for each in self._num_tokens]
        if selection is not self._selection:
            self._most_B, self._selection = torch.tensor(most, device=self._rows_B.device), selection
        return max(most)

    def _chosen(
        self, closeness_BGS: Tensor, num_scored_B11: Tensor, key_S: Tensor, selection: Selection, most: int
    ) -> Picks:
        num_kv_heads, num_keys = closeness_BGS.shape[1:]
        num_close_B = (closeness_BGS > -selection.alpha).sum((1, 2))
        num_B = ((num_close_B + num_kv_heads - 1) // num_kv_heads).clamp(min=1)
        num_B = num_B.minimum(self._most_B).minimum(num_scored_B11.view(-1))
        most = min(most, num_keys)
        best_BGX = closeness_BGS.sort(descending=True, stable=True).indices[:, :, :most]
        is_best_B1X = torch.arange(most, device=key_S.device) < num_B.view(-1, 1, 1)
        is_chosen_BGS = torch.zeros_like(closeness_BGS, dtype=torch.bool)
        is_chosen_BGS.scatter_(2, best_BGX, is_best_B1X.expand_as(best_BGX))
        lengths_B11 = self._lengths_B.view(-1, 1, 1)
        last_B11 = (lengths_B11 - selection.num_last).clamp(min=0).minimum(num_scored_B11)
        is_always_B1S = (key_S < selection.num_first) | (key_S >= last_B11)
        is_chosen_BGS |= is_always_B1S & (key_S < lengths_B11)
        most_picks = min(most + selection.num_first + selection.num_last, num_keys)
        keys_BGK, num_BG = packed(is_chosen_BGS, most_picks, key_S.int())
        return Picks(keys_BGK, num_BG)


def _closeness(q_BNR: Tensor, k_BGSR: Tensor, is_scored_B1S: Tensor) -> Tensor:
    """Return S_g[j], `[B, G, S]`, with -inf for keys that are not scored."""
    (num_rows, num_kv_heads), num_columns = k_BGSR.shape[:2], k_BGSR.shape[3]
    q_BGJR = q_BNR.view(num_rows, num_kv_heads, -1, num_columns)
    score_BGJS = q_BGJR @ k_BGSR.float().mT
    score_BGJS = score_BGJS.nan_to_num_(_LEAST, math.inf, _LEAST).masked_fill_(~is_scored_B1S.unsqueeze(1), _LEAST)
    score_BGJS -= score_BGJS.amax(3, keepdim=True)
    closeness_BGS = score_BGJS.nan_to_num_(_LEAST, math.inf, _LEAST).amax(2)
    return closeness_BGS.masked_fill_(~is_scored_B1S, -math.inf)


def packed(is_entry_BGX: Tensor, most: int, *values: Tensor) -> tuple[Tensor, ...]:
    """Compact lists: move the entries for which `is_entry_BGX` is True to the front of each list, in order.

    `values` are int32 tensors that are broadcast to the lists. Return a tensor `[B, G, most]` for each of them, and
    finally the number of entries of each list, `[B, G]`, int32. No list may have more than `most` entries. Values after
    the last entry of a list are 0.
    """
    count_BGX = is_entry_BGX.cumsum(2)
    at_BGX = torch.where(is_entry_BGX, count_BGX - 1, most)  # other elements go to the end, and are cut off
    shape = (*is_entry_BGX.shape[:2], most + 1)
    lists = [torch.zeros(shape, dtype=torch.int32, device=at_BGX.device) for _ in values]
    for to_BGK, each in zip(lists, values, strict=True):
        to_BGK.scatter_(2, at_BGX, each.expand_as(at_BGX))
    return *(each[:, :, :most].contiguous() for each in lists), count_BGX[:, :, -1].int()
