"""Draft view that selects the keys with the best approximate scores in each draft step (InfiniGen; Lee et al., 2024). A
draft view selects the keys that draft steps attend to.

Drafts select keys by the same method as residency `infinigen` (`generate_workers.residency.sparse.infinigen`). The step
that verifies drafts attends to all keys, so the output is exact. Scores are approximated with partial keys (keys
reduced to few columns), which are stored next to each sequence's KV (`residency.sparse.draft_index`). The first two
layers attend to all keys. Every other layer selects keys with its own queries, even if `baton prepare` was run with
lookahead 1. With lookahead 1, the residency guesses queries one layer early, to fetch the keys in time. Drafts do not
need guesses, because all keys are already on the device. The number of selected keys depends on the settings that
`baton prepare` computed for the model, and is at most `num_keys`.

Used on the engine's thread. Shape suffixes: B sequences of one new token, N heads, G kv heads, H head dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from baton.modeling.forward.selection import PartialRows, Picks, Selection
from generate_workers.engine.rows import Row
from generate_workers.residency.port import StepRows
from generate_workers.residency.sparse.draft_index import IndexedResidency
from generate_workers.speculation.choosing import ChoosingTurns
from generate_workers.speculation.self_drafts import DraftStep

_NO_SHARE = 1e-12
"""Value of `Selection.most_share` (maximum fraction of keys selected by score) that is so small that it allows 0 keys.
The number of keys selected by score is then limited by `Selection.free_keys` alone."""


class InfinigenView:
    """Draft view (selection of the keys that draft steps attend to): the keys with the best approximate scores in each
    sequence. The scores are computed from partial keys (keys reduced to few columns). The selection uses the settings
    that `baton prepare` computed for the model."""

    def __init__(self, residency: IndexedResidency, num_keys: int) -> None:
        """`num_keys`: maximum number of keys that a kv head attends to, including the first and the latest keys."""
        self._residency = residency
        self._selection = at_most(num_keys, residency.prepared.selection)

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Compute the partial keys of those tokens that have none yet. `num_keys` is ignored."""
        for row in rows:
            index = self._residency.indices[row.slot]
            index.follow(row.num_cached, partial(self._residency.kv, row.slot))

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a draft step, which selects keys in each layer except the first two."""
        indices = [self._residency.indices[slot] for slot, _ in rows]
        with self._residency.step(rows) as step:
            keys = PartialRows(indices, [tokens.end for _, tokens in rows])
            yield DraftStep(step.spans, ChoosingTurns(partial(self._choose, rows, keys)))

    def forget(self, row: Row) -> None:
        """Do nothing: partial keys are released together with the sequence's slot."""

    def _choose(self, rows: StepRows, keys: PartialRows, layer: int, q_BNH: Tensor) -> Picks | None:
        """Make the new tokens' partial keys, and return the layer's selected keys; None in the first two layers."""
        if layer not in keys.layers:
            return None
        basis = self._residency.prepared.basis
        k_BGH = torch.stack([self._residency.kv(slot, layer, tokens)[0, 0] for slot, tokens in rows])
        keys.append(layer, k_BGH, basis.key_projection(layer))
        return keys.select(layer, basis.queries(layer, q_BNH), self._selection)


def at_most(num_keys: int, selection: Selection) -> Selection:
    """Return a copy of `selection` that selects at most `num_keys` keys per kv head, regardless of the sequence's
    length. The first and latest keys, which are always selected, count as part of `num_keys`. If they leave no key to
    be selected by score, one key is selected by score nevertheless."""
    by_score = max(num_keys - selection.num_first - selection.num_last, 1)
    return replace(selection, most_share=_NO_SHARE, free_keys=by_score)
