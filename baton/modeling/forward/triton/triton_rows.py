"""Attention of the sequences of a generation step on a GPU, with Triton kernels. Sequences may have any number of new
tokens, in contrast to `baton.modeling.forward.decode_rows.DecodeRows`.

Keys are in pages. Each layer needs one kernel launch to append all new keys and values, one or two launches for the
attention of sequences with few new tokens, and one launch for the attention of all other sequences. The number of
launches depends neither on the number of sequences nor on the order of their pages. The host reads no results.

Shape letters: B sequences, T tokens of the step, N heads, G kv heads, C pages of a sequence.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.modeling.device.sending import to_device
from baton.modeling.forward.selection import Picks
from baton.modeling.kernels.triton.append import append_kv
from baton.modeling.kernels.triton.decode import SeenKeys, decode_attention
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.spans import SpanRows, divide, span_attention, tiles_for
from baton.modeling.kernels.triton.tiles import MOST_QUERIES, alike, power_of_two
from baton.modeling.kv.buffers import KvPlace

Ints = npt.NDArray[np.int32]


class TritonRows:
    """Attention of those spans of a step whose KV is in pages. A span is a run of consecutive new tokens of one
    sequence. The pages are in one pool, or in two pools that hold different layers."""

    def __init__(self, spans: Sequence[tuple[int, KvPlace]], windows: Sequence[int | None], group: int) -> None:
        """Collect the kernel arguments of the spans (consecutive new tokens of one sequence). `spans`: for each span,
        the index of its first token among the tokens of the step, and the location of its keys. `windows`: sliding
        window of each layer in tokens, or None. `group`: number of query heads that share a kv head."""
        self._pools = [_Pool(spans, group)]
        others = [(first, place.others) for first, place in spans if place.others is not None]
        if others:
            assert len(others) == len(spans), "all rows have memory for the same layers"
            self._pools.append(_Pool(others, group))
        self._windows = windows

    def append(self, layer: int, k_TGH: Tensor, v_TGH: Tensor) -> None:
        """Write the keys and values of the new tokens of all spans to the pages of their sequences. `k_TGH` and `v_TGH`
        contain the keys and values of all tokens of the step."""
        pool, pages_PS2GH = self._of_layer(layer)
        append_kv(k_TGH, v_TGH, pages_PS2GH, pool.slots_U)

    def attend(self, layer: int, q_TNH: Tensor, num_kv_heads: int, picks: Picks | None = None) -> Tensor:
        """Return the attention output of all tokens of the step, `[T, N, H]`, in the dtype of the queries. For tokens
        of other spans, nothing is written. `q_TNH` contains the queries of all tokens of the step. If `picks` is given,
        each sequence with few new tokens attends to exactly the selected keys, and the layer's sliding window is not
        applied to it."""
        pool, pages_PS2GH = self._of_layer(layer)
        assert pages_PS2GH.shape[3] == num_kv_heads, f"pages of {pages_PS2GH.shape[3]} kv heads, not {num_kv_heads}"
        o_TNH, window = q_TNH.new_empty(q_TNH.shape), self._windows[layer]
        if pool.few is not None:
            seen = SeenKeys(window=window, unseen_B2=pool.unseen_B2)
            if picks is not None:
                assert pool.few.most_queries == 1, "keys are selected for sequences with one new token"
                seen = SeenKeys(picks=(picks.keys_BGK, picks.num_BG))
            decode_attention(q_TNH, pages_PS2GH, pool.few, seen, o_TNH=o_TNH)
        if pool.many is not None:
            span_attention(q_TNH, pages_PS2GH, pool.many, window=window, o_TNH=o_TNH)
        return o_TNH

    def _of_layer(self, layer: int) -> tuple["_Pool", Tensor]:
        """Return the pool that contains a layer, and the pages of the layer, `[P, S, 2, G, H]`."""
        first, last = self._pools[0], self._pools[-1]
        if first is last or layer < len(first.data_LPS2GH):
            return first, first.data_LPS2GH[layer]
        return last, last.data_LPS2GH[(layer - len(first.data_LPS2GH)) % len(last.data_LPS2GH)]


class RowArrays(NamedTuple):
    """Kernel arguments that describe the KV of some sequences in one pool of pages, in host memory, int32. `few`: the
    sequences with at most MOST_QUERIES new tokens. `many`: all others."""

    slots_U: Ints
    """For each token of the step, the index of its key among the tokens of all pages (`append_kv`)."""
    few: "TableArrays"
    many: "TableArrays"
    unseen_B2: Ints
    """Range of keys to which each sequence of `few` does not attend. Empty if all attend to all of their keys."""
    blocks_X2: Ints
    """Blocks of queries of `many` (`SpanRows`)."""


class TableArrays(NamedTuple):
    """Block table, numbers of keys, numbers of new tokens before each sequence, and indices of the first new tokens, as
    in `StepRows`."""

    table_BC: Ints
    lengths_B: Ints
    starts_E: Ints
    firsts_B: Ints


def arrays_of(spans: Sequence[tuple[int, KvPlace]], group: int, tile_rows: int) -> RowArrays:
    """Return the kernel arguments of spans in one pool. `spans`: for each span, the index of its first token among the
    tokens of the step, and the location of its keys. `group`: number of query heads that share a kv head. `tile_rows`:
    number of pairs of a query and a head in a block of queries."""
    tables = [place.table for _, place in spans if place.table is not None]
    assert len(tables) == len(spans), "rows of Triton's kernels have pages"
    page_tokens = tables[0].page_tokens
    num_pages = -(-max(place.num_keys for _, place in spans) // page_tokens)
    table_BC = np.zeros((len(tables), alike(num_pages)), np.int32)
    for row, table in enumerate(tables):
        pages_C = table.pages_C[:num_pages]
        table_BC[row, : len(pages_C)] = pages_C
    few = [row for row, (_, place) in enumerate(spans) if place.num_new <= MOST_QUERIES]
    many = [row for row, (_, place) in enumerate(spans) if place.num_new > MOST_QUERIES]
    few_places, many_places = ([spans[row][1] for row in rows] for rows in (few, many))
    has_unseen = any(place.unseen is not None for place in few_places)
    assert all(place.unseen is None for place in many_places), "long spans attend to all earlier keys"
    unseen = [(0, 0) if each.unseen is None else (each.unseen.start, each.unseen.end) for each in few_places]
    new, keys = ([getattr(each, name) for each in many_places] for name in ("num_new", "num_keys"))
    few_arrays, many_arrays = (
        TableArrays(table_BC[rows], *_numbers([spans[row] for row in rows])) for rows in (few, many)
    )
    return RowArrays(
        _slots(spans, table_BC, page_tokens),
        few_arrays,
        many_arrays,
        np.array(unseen if has_unseen else [], np.int32).reshape(-1, 2),
        divide(new, keys, group, tile_rows) if many else np.zeros((0, 2), np.int32),
    )


class _Pool:
    """Kernel arguments that describe the KV of the spans (consecutive new tokens of one sequence) in one pool of
    pages. They are copied to the device together."""

    def __init__(self, spans: Sequence[tuple[int, KvPlace]], group: int) -> None:
        tables = [place.table for _, place in spans if place.table is not None]
        self.data_LPS2GH = tables[0].data_LPS2GH
        capacity = tables[0].page_tokens * max(len(table.pages_C) for table in tables)
        tiles = tiles_for(self.data_LPS2GH.shape[5], self.data_LPS2GH.dtype, self.data_LPS2GH.device)
        slots, few, many, unseen, blocks = arrays_of(spans, group, tiles.rows)
        parts = [each.reshape(-1) for each in (slots, *few, *many, unseen, blocks)]
        self.slots_U, *sent, unseen_X, blocks_X = _sent(parts, self.data_LPS2GH.device)
        """For each token of the step, the index of its key among the tokens of all pages (`append_kv`)."""
        few_places, many_places = (
            [place for _, place in spans if (place.num_new <= MOST_QUERIES) == is_few] for is_few in (True, False)
        )
        self.few = _rows(sent[:4], few_places, capacity) if few_places else None
        """Kernel argument for decode attention: the spans with at most MOST_QUERIES new tokens."""
        self.many = None
        """Kernel argument for prefill attention: all other spans."""
        if many_places:
            self.many = SpanRows(_rows(sent[4:], many_places, capacity), blocks_X.view(-1, 2), tiles)
        self.unseen_B2 = unseen_X.view(-1, 2) if len(unseen) else None
        """Ranges of keys to which the spans in `few` do not attend."""


def _slots(spans: Sequence[tuple[int, KvPlace]], table_BC: Ints, page_tokens: int) -> Ints:
    """Return the index of each token's key among the tokens of all pages, by the token's index in the step. -1: the
    token belongs to none of these spans."""
    first_B, new_B = np.array([(first, place.num_new) for first, place in spans]).T
    end_B = np.array([place.num_keys if place.own is None else place.own + 1 for _, place in spans])
    rows_U = np.repeat(np.arange(len(spans)), new_B)
    nth_U = np.arange(len(rows_U)) - np.repeat(np.cumsum(new_B) - new_B, new_B)
    keys_U = nth_U + (end_B - new_B)[rows_U]
    slots_U = np.full(int((first_B + new_B).max()), -1, np.int32)
    slots_U[first_B[rows_U] + nth_U] = table_BC[rows_U, keys_U // page_tokens] * page_tokens + keys_U % page_tokens
    return slots_U


def _numbers(spans: Sequence[tuple[int, KvPlace]]) -> tuple[Ints, Ints, Ints]:
    """Return the numbers of keys of spans, the numbers of new tokens before each span, and the indices of the spans'
    first tokens in the step."""
    starts = itertools.accumulate((place.num_new for _, place in spans), initial=0)
    numbers = [place.num_keys for _, place in spans], list(starts), [first for first, _ in spans]
    lengths_B, starts_E, firsts_B = (np.array(each, np.int32) for each in numbers)
    return lengths_B, starts_E, firsts_B


def _rows(sent: Sequence[Tensor], places: Sequence[KvPlace], capacity: int) -> StepRows:
    table_X, lengths_B, starts_E, firsts_B = sent
    return StepRows(
        table_BC=table_X.view(len(places), -1),
        lengths_B=lengths_B,
        starts_E=starts_E,
        most_queries=power_of_two(max(place.num_new for place in places)),
        most_keys=max(place.num_keys for place in places),
        firsts_B=firsts_B,
        capacity_keys=capacity,
        num_tokens=sum(place.num_new for place in places),
    )


def _sent(parts: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device, in one copy. Each result begins at a multiple of 64 bytes."""
    starts = list(itertools.accumulate((alike(len(part)) for part in parts), initial=0))
    whole_X = np.zeros(starts[-1], np.int32)
    for start, part in zip(starts, parts, strict=False):
        whole_X[start : start + len(part)] = part
    there_X = to_device(torch.from_numpy(whole_X), device)
    return [there_X[start : start + len(part)] for start, part in zip(starts, parts, strict=False)]
