"""Attention of the sequences of a generation step that have few new tokens, on a GPU. Same interface as
`baton.modeling.forward.decode_rows.DecodeRows`, but with Triton kernels.

Keys are in pages. Each layer needs one kernel launch to append all new keys and values, and one or two launches for the
attention, regardless of the number of sequences. The host reads no results.

Shape letters: B new tokens of these sequences, T tokens of the step, N heads, G kv heads, H head dim, at most C pages
of a sequence.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.modeling.forward.selection import Picks
from baton.modeling.kernels.triton.append import append_kv
from baton.modeling.kernels.triton.decode import SeenKeys, decode_attention
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.tiles import LEAST_SPLIT_KEYS, power_of_two
from baton.modeling.kv.buffers import KvPlace

_ALIKE = 16
"""Strides of block tables are rounded up to a multiple of this number. Triton compiles one kernel for all strides that
are multiples of 16, and further kernels for other strides."""


class TritonRows:
    """Attention of those spans of a step whose KV is in pages and that have few new tokens. A span is a run of
    consecutive new tokens of one sequence. The pages are in one pool, or in two pools that hold different layers."""

    def __init__(self, spans: Sequence[tuple[int, KvPlace]], windows: Sequence[int | None]) -> None:
        """Collect the kernel arguments of the spans (consecutive new tokens of one sequence). `spans`: for each span,
        the index of its first token among the tokens of the step, and the location of its keys. `windows`: sliding
        window of each layer in tokens, or None."""
        places = [place for _, place in spans]
        self._pools = [_Pool(places)]
        others = [place.others for place in places if place.others is not None]
        if others:
            assert len(others) == len(places), "all rows have memory for the same layers"
            self._pools.append(_Pool(others))
        tokens = [first + index for first, place in spans for index in range(place.num_new)]
        self.tokens_B = torch.tensor(tokens, device=self._pools[0].data_LPS2GH.device)
        self._in_order = tokens == list(range(len(tokens)))
        self._windows = windows

    def append(self, layer: int, k_TGH: Tensor, v_TGH: Tensor) -> None:
        """Write the keys and values of the new tokens of all spans to the pages of their sequences. `k_TGH` and `v_TGH`
        contain the keys and values of all tokens of the step."""
        pool, pages_PS2GH = self._of_layer(layer)
        append_kv(self._of_rows(k_TGH), self._of_rows(v_TGH), pages_PS2GH, pool.new_rows)

    def attend(self, layer: int, q_TNH: Tensor, num_kv_heads: int, picks: Picks | None = None) -> Tensor:
        """Return the attention output of the new tokens of all spans, `[B, N, H]`, in the dtype of the queries. `q_TNH`
        contains the queries of all tokens of the step. If `picks` is given, each sequence attends to exactly the
        selected keys, and the layer's sliding window is not applied."""
        pool, pages_PS2GH = self._of_layer(layer)
        if picks is None:
            seen = SeenKeys(window=self._windows[layer], unseen_B2=pool.unseen_B2)
        else:
            seen = SeenKeys(picks=(picks.keys_BGK, picks.num_BG))
        assert pages_PS2GH.shape[3] == num_kv_heads, f"pages of {pages_PS2GH.shape[3]} kv heads, not {num_kv_heads}"
        return decode_attention(self._of_rows(q_TNH), pages_PS2GH, pool.rows, seen)

    def _of_layer(self, layer: int) -> tuple["_Pool", Tensor]:
        """Return the pool that contains a layer, and the pages of the layer, `[P, S, 2, G, H]`."""
        first, last = self._pools[0], self._pools[-1]
        if first is last or layer < len(first.data_LPS2GH):
            return first, first.data_LPS2GH[layer]
        return last, last.data_LPS2GH[(layer - len(first.data_LPS2GH)) % len(last.data_LPS2GH)]

    def _of_rows(self, x_TNH: Tensor) -> Tensor:
        is_all = self._in_order and len(x_TNH) == len(self.tokens_B)
        return x_TNH if is_all else x_TNH[self.tokens_B]


class _Pool:
    """Kernel arguments that describe the KV of the spans (consecutive new tokens of one sequence) in one pool of
    pages."""

    def __init__(self, places: Sequence[KvPlace]) -> None:
        tables = [place.table for place in places if place.table is not None]
        assert len(tables) == len(places), "rows of Triton's kernels have pages"
        self.data_LPS2GH = tables[0].data_LPS2GH
        device, most_keys = self.data_LPS2GH.device, max(place.num_keys for place in places)
        num_pages = -(-most_keys // tables[0].page_tokens)
        table_BC = torch.zeros(len(tables), _alike(num_pages), dtype=torch.int32)
        for row, table in enumerate(tables):
            pages_C = table.pages_C[:num_pages]
            table_BC[row, : len(pages_C)] = pages_C
        starts = itertools.accumulate((place.num_new for place in places), initial=0)
        self.rows = StepRows(
            table_BC=table_BC.to(device),
            lengths_B=torch.tensor([place.num_keys for place in places], dtype=torch.int32, device=device),
            starts_E=torch.tensor(list(starts), dtype=torch.int32, device=device),
            most_queries=power_of_two(max(place.num_new for place in places)),
            most_keys=most_keys,
        )
        """Kernel argument for attention: block table and total number of keys of each sequence."""
        self.new_rows = self.rows
        """Kernel argument for writing the keys and values of new tokens. The kernel writes to the end of a sequence's
        keys. In some sequences, the new token's key must be stored at another index (`KvPlace.own`). For these
        sequences, this argument counts only the keys up to that index, inclusive. Without such sequences, it is the
        same object as `rows`."""
        if any(place.own is not None for place in places):
            ends = [place.num_keys if place.own is None else place.own + 1 for place in places]
            self.new_rows = replace(self.rows, lengths_B=torch.tensor(ends, dtype=torch.int32, device=device))
        self.unseen_B2: Tensor | None = None
        if any(place.unseen is not None for place in places):
            unseen = [(0, 0) if place.unseen is None else (place.unseen.start, place.unseen.end) for place in places]
            self.unseen_B2 = torch.tensor(unseen, dtype=torch.int32, device=device)


def _alike(num_pages: int) -> int:
    """Return the smallest multiple of _ALIKE that is at least `num_pages`. It is used as the stride of a
    block table."""
    return -(-num_pages // _ALIKE) * _ALIKE


def compile_rows(
    pages_LPS2GH: Tensor, num_heads: int, windows: Sequence[int | None], most_queries: Sequence[int]
) -> None:
    """Compile the kernels for steps that are not captured in a CUDA graph. These are steps that also prefill, and steps
    that verify up to `most_queries` tokens per sequence.

    Takes about a second per kernel, the first time on a machine. Nothing is written to the pages, because the kernels
    run on one sequence without tokens.
    """
    pages_PS2GH, device = pages_LPS2GH[0], pages_LPS2GH.device
    page_tokens, _, num_kv_heads, head_dim = pages_PS2GH.shape[1:]
    q_TNH = pages_PS2GH.new_zeros(1, num_heads, head_dim)
    k_TGH = pages_PS2GH.new_zeros(1, num_kv_heads, head_dim)
    for num_queries, most_keys in itertools.product(most_queries, (1, LEAST_SPLIT_KEYS + 1)):
        rows = StepRows(
            table_BC=torch.zeros(1, _alike(-(-most_keys // page_tokens)), dtype=torch.int32, device=device),
            lengths_B=torch.zeros(1, dtype=torch.int32, device=device),
            starts_E=torch.zeros(2, dtype=torch.int32, device=device),
            most_queries=num_queries,
            most_keys=most_keys,
        )
        append_kv(k_TGH, k_TGH, pages_PS2GH, rows)
        unseen = [None, torch.zeros(1, 2, dtype=torch.int32, device=device)]
        for window, unseen_B2 in itertools.product(dict.fromkeys(windows), unseen):
            decode_attention(q_TNH, pages_PS2GH, rows, SeenKeys(window=window, unseen_B2=unseen_B2))
