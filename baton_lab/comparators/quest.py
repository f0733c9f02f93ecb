"""A draft view of the pages of keys that could score highest, chosen in each step (Quest; Tang et al., 2024).

A comparator, in plain torch. A page is 16 keys, of which each channel's least and largest value are kept. No key of a
page scores higher against a query q than

    sum over channels c of max(q[c] least[c], q[c] largest[c])

In each layer but the first two, which attend to all keys, a kv head takes the pages with the largest such sums, added
up over the query heads that share it; of equals the earlier page. The latest keys, which fill no page or are of
drafts, are always attended to. Together they are at most `num_keys`, unless not even one page fits: one is taken.

The pages' values are kept from round to round. They take a sixteenth of their KV's bytes, which are not counted as the
view's memory, because the view serves only for comparison.

Engine's thread. L layers, B rows of one new token, N heads, G kv heads, H head dim, P pages, I = 16 keys of a page.
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
    """The least and largest values of one row's pages, in the layers that choose."""

    def __init__(self, layout: KvLayout, max_tokens: int) -> None:
        """Allocate room for the pages of a sequence of `max_tokens` tokens."""
        num_layers = max(layout.num_layers - NUM_WHOLE_LAYERS, 0)
        shape = (num_layers, max_tokens // PAGE_KEYS, 2, layout.num_kv_heads, layout.head_dim)
        self.num = 0
        """Pages that are filled."""
        self.data_LP2GH = torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype])
        """The least values, then the largest."""

    def follow(self, residency: DeviceResidency, slot: SlotId, num_tokens: int) -> None:
        """Add the pages that a row's first `num_tokens` tokens have filled, except those added before."""
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
    """A DraftView of the pages that could score highest, in the rows' own KV."""

    def __init__(self, residency: DeviceResidency, layout: KvLayout, num_keys: int) -> None:
        """`num_keys`: keys of each kv head, the latest included."""
        self._residency = residency
        self._layout = layout
        self._num_keys = num_keys
        self._pages: dict[Row, Pages] = {}
        self._pages_of: dict[SlotId, Pages] = {}
        """Pages of the round's rows."""

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Take in the rows' new pages."""
        for row in rows:
            if row not in self._pages:
                self._pages[row] = Pages(self._layout, row.capacity_tokens)
            self._pages[row].follow(self._residency, row.slot, row.num_cached)
        self._pages_of = {row.slot: self._pages[row] for row in rows}

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a forward whose rows choose in each layer but the first two."""

        def choose(layer: int, q_BNH: Tensor) -> Picks | None:
            if layer < NUM_WHOLE_LAYERS:
                return None
            return picks_of([self._best(layer, q_NH, *row) for q_NH, row in zip(q_BNH, rows, strict=True)])

        with self._residency.step(rows) as step:
            yield DraftStep(step.spans, ChoosingTurns(choose))

    def forget(self, row: Row) -> None:
        """Drop the row's pages."""
        self._pages.pop(row, None)

    def _best(self, layer: int, q_NH: Tensor, slot: SlotId, tokens: TokenRange) -> Tensor:
        """Return a row's keys in a layer, int32 `[G, K]`."""
        pages = self._pages_of[slot]
        latest_K = torch.arange(pages.num * PAGE_KEYS, tokens.end, dtype=torch.int32)
        num_pages = min(max((self._num_keys - len(latest_K)) // PAGE_KEYS, 1), pages.num)
        best_GP = top_keys(page_scores(q_NH, pages.data_LP2GH[layer - NUM_WHOLE_LAYERS, : pages.num]), num_pages)
        keys_GK = (best_GP.unsqueeze(2) * PAGE_KEYS + torch.arange(PAGE_KEYS, dtype=torch.int32)).flatten(1)
        return torch.cat((keys_GK, latest_K.expand(len(keys_GK), -1)), 1)


def page_scores(q_NH: Tensor, pages_P2GH: Tensor) -> Tensor:
    """Return each page's sum, fp32 `[G, P]`. A channel's larger product is with the largest value where the query is
    positive, else with the least; so queries are added up over heads by their sign, before they are multiplied."""
    least_GHP, largest_GHP = pages_P2GH.float().permute(1, 2, 3, 0)
    q_GJH = by_kv_head(q_NH.unsqueeze(0), len(least_GHP)).squeeze(2)
    below_G1H, above_G1H = (part.sum(1, keepdim=True) for part in (q_GJH.clamp(max=0), q_GJH.clamp(min=0)))
    scores_G1P: Tensor = below_G1H @ least_GHP + above_G1H @ largest_GHP
    return scores_G1P.squeeze(1)
