"""A draft view of the keys that seem to matter by partial scores, chosen in each step (InfiniGen; Lee et al., 2024).

The selection of residency `infinigen` (`generate_workers.residency.sparse.infinigen`), for drafts: a step that verifies
attends to all keys, so texts stay exact. Partial keys lie beside each row's KV (`residency.sparse.draft_index`). The
first two layers attend to all keys. The others choose by the layer's own queries, whatever the prepared lookahead:
nothing has to be fetched in time. As many keys as the prepared selection says, but `num_keys` at most.

Engine's thread. B rows of one new token, N heads, G kv heads, H head dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from generate_workers.engine.rows import Row
from generate_workers.residency.port import StepRows
from generate_workers.residency.sparse.draft_index import IndexedResidency
from generate_workers.speculation.choosing import ChoosingTurns
from generate_workers.speculation.self_drafts import DraftStep
from modeling.forward.selection import PartialRows, Picks, Selection, select_keys

_NO_SHARE = 1e-12
"""A part of a row that is no key, so that a fixed number bounds the keys chosen by score."""


class InfinigenView:
    """A DraftView of the keys that a prepared selection chooses, in the rows' own KV."""

    def __init__(self, residency: IndexedResidency, num_keys: int) -> None:
        """`num_keys`: most keys of each kv head, the first and the latest included."""
        self._residency = residency
        self._selection = at_most(num_keys, residency.prepared.selection)

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Make partial keys of the rows' new tokens."""
        for row in rows:
            index = self._residency.indices[row.slot]
            index.follow(row.num_cached, partial(self._residency.kv, row.slot))

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a forward whose rows choose in each layer but the first two."""
        indices = [self._residency.indices[slot] for slot, _ in rows]
        with self._residency.step(rows) as step:
            keys = PartialRows(indices, [tokens.end for _, tokens in rows])
            yield DraftStep(step.spans, ChoosingTurns(partial(self._choose, rows, keys)))

    def forget(self, row: Row) -> None:
        """Do nothing: partial keys go with the slot's claim."""

    def _choose(self, rows: StepRows, keys: PartialRows, layer: int, q_BNH: Tensor) -> Picks | None:
        """Make the new tokens' partial keys, and choose the layer's keys."""
        if layer not in keys.layers:
            return None
        basis = self._residency.prepared.basis
        k_BGH = torch.stack([self._residency.kv(slot, layer, tokens)[0, 0] for slot, tokens in rows])
        keys.append(layer, k_BGH, basis.key_projection(layer))
        return select_keys(basis.queries(layer, q_BNH), keys, layer, self._selection)


def at_most(num_keys: int, selection: Selection) -> Selection:
    """Return the selection with a bound of `num_keys` keys in a row of any length, as far as the keys that are always
    chosen leave room; at least one is chosen by score."""
    by_score = max(num_keys - selection.num_first - selection.num_last, 1)
    return replace(selection, most_share=_NO_SHARE, free_keys=by_score)
