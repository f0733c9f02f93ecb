"""Draft view that attends to pages of keys, which are selected in each step by an upper bound on their keys' scores
(Quest; Tang et al., 2024). A draft view determines which keys the draft steps of speculative decoding attend to.

This draft view serves only for comparison and is written in plain torch. A page is 16 consecutive keys. For each
channel c of a page, the view stores the smallest value least[c] and the largest value largest[c] of the page's keys.
With a query q, the score of every key of the page is at most this bound:

    sum over c of max(q[c] * least[c], q[c] * largest[c])

The first two layers attend to all keys. In each other layer, a kv head selects the pages with the largest bounds,
summed over the query heads that share the kv head. If bounds are equal, the earlier page is selected. The latest keys
are always selected. These are the keys after the last stored page, including the keys of draft tokens. The latest keys
and the selected pages have at most `num_keys` keys in total, except that at least one page is always selected.

The view keeps the smallest and largest values of all pages until their sequence ends. They take a sixteenth of the
bytes of the pages' KV. These bytes are not counted as memory of the view, because it serves only for comparison.

Used on the engine's thread. L layers, B sequences with one new token, N heads, G kv heads, H head dim, P pages, I = 16
keys of a page.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from baton.modeling.forward.selection import Picks
from baton.modeling.kv.buffers import TORCH_DTYPES
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS
from baton.types import KvLayout, SlotId, TokenRange
from baton_lab.comparators.ragged import picks_of
from generate_workers.engine.rows import Row
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import StepRows
from generate_workers.speculation.choosing import ChoosingTurns, by_kv_head, top_keys
from generate_workers.speculation.self_drafts import DraftStep

PAGE_KEYS = 16


class Pages:
    """Smallest and largest value of each channel of the keys in each page (16 keys) of one sequence, in all layers
    except the first two."""

    def __init__(self, layout: KvLayout, max_tokens: int) -> None:
        """Allocate memory for the smallest and largest values of the pages of a sequence with at most `max_tokens`
        tokens."""
        num_layers = max(layout.num_layers - NUM_WHOLE_LAYERS, 0)
        shape = (num_layers, max_tokens // PAGE_KEYS, 2, layout.num_kv_heads, layout.head_dim)
        self.num = 0
        """Number of pages whose smallest and largest values are stored."""
        self.data_LP2GH = torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype])
        """Smallest and largest value of each channel in each page. In the third dimension, index 0 is the smallest and
        index 1 the largest value."""

    def follow(self, residency: DeviceResidency, slot: SlotId, num_tokens: int) -> None:
        """Store the smallest and largest key values of the pages that the first `num_tokens` tokens of the sequence
        fill. Pages that are already stored are skipped."""
        pages = slice(self.num, num_tokens // PAGE_KEYS)
        if pages.start == pages.stop:
            return
        tokens = TokenRange(pages.start * PAGE_KEYS, pages.stop * PAGE_KEYS)
        for at, data_P2GH in enumerate(self.data_LP2GH):
            k_SGH = residency.kv(slot, NUM_WHOLE_LAYERS + at, tokens)[:, 0]
            k_PIGH = k_SGH.view(-1, PAGE_KEYS, *k_SGH.shape[1:])
            data_P2GH[pages, 0], data_P2GH[pages, 1] = k_PIGH.amin(1), k_PIGH.amax(1)
        self.num = pages.stop


class QuestView:
    """Draft view (keys that draft steps attend to) that selects the pages with the largest upper bounds on their keys'
    scores. It reads the KV that the sequences already have. Implements DraftView."""

    def __init__(self, residency: DeviceResidency, layout: KvLayout, num_keys: int) -> None:
        """Create the draft view. `num_keys`: number of keys that each kv head attends to, including the latest keys."""
        self._residency = residency
        self._layout = layout
        self._num_keys = num_keys
        self._pages: dict[Row, Pages] = {}
        self._pages_of: dict[SlotId, Pages] = {}
        """Smallest and largest key values of each page, by slot. Contains the sequences that were passed to the latest
        call of `begin`."""

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Prepare draft steps for the sequences `rows`. Store the smallest and largest key values of each page (16
        keys) that a sequence has filled since the previous call with this sequence. `num_keys` is not used."""
        for row in rows:
            if row not in self._pages:
                self._pages[row] = Pages(self._layout, row.capacity_tokens)
            self._pages[row].follow(self._residency, row.slot, row.num_cached)
        self._pages_of = {row.slot: self._pages[row] for row in rows}

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a draft step: a forward pass over the sequences `rows` that selects keys in each layer except the
        first two."""

        def choose(layer: int, q_BNH: Tensor) -> Picks | None:
            if layer < NUM_WHOLE_LAYERS:
                return None
            return picks_of([self._best(layer, q_NH, *row) for q_NH, row in zip(q_BNH, rows, strict=True)])

        with self._residency.step(rows) as step:
            yield DraftStep(step.spans, ChoosingTurns(choose))

    def forget(self, row: Row) -> None:
        """Delete the smallest and largest key values that are stored for a sequence's pages."""
        self._pages.pop(row, None)

    def _best(self, layer: int, q_NH: Tensor, slot: SlotId, tokens: TokenRange) -> Tensor:
        """Return the keys that a sequence selects in a layer, int32 `[G, K]`."""
        pages = self._pages_of[slot]
        latest_K = torch.arange(pages.num * PAGE_KEYS, tokens.end, dtype=torch.int32)
        num_pages = min(max((self._num_keys - len(latest_K)) // PAGE_KEYS, 1), pages.num)
        best_GP = top_keys(page_scores(q_NH, pages.data_LP2GH[layer - NUM_WHOLE_LAYERS, : pages.num]), num_pages)
        keys_GK = (best_GP.unsqueeze(2) * PAGE_KEYS + torch.arange(PAGE_KEYS, dtype=torch.int32)).flatten(1)
        return torch.cat((keys_GK, latest_K.expand(len(keys_GK), -1)), 1)


def page_scores(q_NH: Tensor, pages_P2GH: Tensor) -> Tensor:
    """Return an upper bound on the scores of each page's keys, fp32 `[G, P]`. The bound of a kv head is the sum of the
    bounds of its query heads.

    In each channel, the bound multiplies a positive query value by the page's largest key value, and a negative query
    value by the page's smallest key value. Positive and negative query values are therefore summed over the heads
    separately. The positive sums are then multiplied by the largest values, and the negative sums by the smallest
    values.
    """
    least_GHP, largest_GHP = pages_P2GH.float().permute(1, 2, 3, 0)
    q_GJH = by_kv_head(q_NH.unsqueeze(0), len(least_GHP)).squeeze(2)
    below_G1H, above_G1H = (part.sum(1, keepdim=True) for part in (q_GJH.clamp(max=0), q_GJH.clamp(min=0)))
    scores_G1P: Tensor = below_G1H @ least_GHP + above_G1H @ largest_GHP
    return scores_G1P.squeeze(1)
