"""Draft view that attends to the keys with the largest attention weights, selected in each step. A draft view
determines which keys the draft steps of speculative decoding attend to. This one serves only for comparison and saves
no time.

With this draft view, the fraction of accepted drafts is the one that other draft views could reach if they predicted
the attention weights perfectly. Each draft step scores all keys of its sequences. To score them, it reads all keys,
which are half of the KV. It also reads the KV that it attends to. A kv head selects the keys with the largest softmax
weights, summed over the query heads that share the kv head. The new token's own key is always selected.

Used on the engine's thread. B sequences with one new token, N heads, G kv heads, J = N / G, H head dim, S keys of a
sequence.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from baton.modeling.forward.selection import Picks
from baton.types import SlotId, TokenRange
from baton_lab.comparators.ragged import picks_of
from generate_workers.engine.rows import Row
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import StepRows
from generate_workers.speculation.choosing import ChoosingTurns, by_kv_head, top_keys
from generate_workers.speculation.self_drafts import DraftStep


class TopKeysView:
    """Draft view (keys that draft steps attend to) that selects the keys with the largest attention weights. It reads
    the KV that the sequences already have. Implements DraftView."""

    def __init__(self, residency: DeviceResidency, num_keys: int) -> None:
        """Create the draft view. `num_keys`: number of keys that each kv head attends to, including the new token's own
        key."""
        self._residency = residency
        self._num_keys = num_keys

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Do nothing. Keys are read from the sequences' own KV when a step selects them."""

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a draft step: a forward pass over the sequences `rows` that selects keys in each layer."""

        def choose(layer: int, q_BNH: Tensor) -> Picks:
            return picks_of([self._best(layer, q_NH, *row) for q_NH, row in zip(q_BNH, rows, strict=True)])

        with self._residency.step(rows) as step:
            yield DraftStep(step.spans, ChoosingTurns(choose))

    def forget(self, row: Row) -> None:
        """Do nothing, because this draft view stores no data about sequences."""

    def _best(self, layer: int, q_NH: Tensor, slot: SlotId, tokens: TokenRange) -> Tensor:
        """Return the keys that a sequence selects in a layer, int32 `[G, K]`."""
        k_SGH = self._residency.kv(slot, layer, TokenRange(0, tokens.end))[:, 0]
        weights_GS = attention_weights(q_NH, k_SGH)
        weights_GS[:, -1] = torch.inf
        return top_keys(weights_GS, min(self._num_keys, tokens.end))


def attention_weights(q_NH: Tensor, k_SGH: Tensor) -> Tensor:
    """Return the softmax weights of one token's queries over all keys, summed over the query heads of each kv head:
    fp32 `[G, S]`."""
    q_GJH = by_kv_head(q_NH.unsqueeze(0), k_SGH.shape[1]).squeeze(2)
    weights_GJS = (q_GJH @ k_SGH.float().permute(1, 2, 0)).softmax(-1)
    return weights_GJS.sum(1)
