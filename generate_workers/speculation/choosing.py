"""Common parts of the draft views that select keys by scores. A draft view selects the keys that draft steps attend to.
This module finds the keys with the best scores, and has the methods that run before and after each layer of a draft
step.

Used on the engine's thread. Shape suffixes: B sequences of one new token, N heads, G kv heads, H head dim, S keys, K
selected keys at most.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.forward.selection import Picks

Choose = Callable[[int, Tensor], Picks | None]
"""Function that selects the keys that each sequence of a draft step attends to in a layer. Arguments: the layer, and
the queries q_BNH. Returns None if sequences attend to all keys."""


@dataclass(frozen=True)
class ChoosingTurns:
    """Turns (methods that run before and after each layer) of a draft step that selects keys. Each layer's keys are
    selected with the queries of the same layer."""

    choose: Choose

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Do nothing: all keys are already in the memory that attention reads."""

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return the keys that each sequence attends to in `layer`. Each token of the step belongs to a different
        sequence. None: sequences attend to all keys."""
        return self.choose(layer, q_TNH)

    def end(self, layer: int) -> None:
        """Do nothing after a layer: new keys stay in the memory to which they were written."""


def top_keys(scores_GS: Tensor, num_keys: int) -> Tensor:
    """Return the indices of the `num_keys` keys with the largest scores of each kv head, in ascending order, int32 `[G,
    num_keys]`. If scores are equal, the earlier key is selected. NaN counts as less than any number. `num_keys` must be
    at most S, the number of keys."""
    if not num_keys:
        return torch.empty(len(scores_GS), 0, dtype=torch.int32)
    scores_GS = scores_GS.nan_to_num(-math.inf, math.inf, -math.inf)
    least_G1 = scores_GS.topk(num_keys).values[:, -1:]
    is_more_GS, is_least_GS = scores_GS > least_G1, scores_GS == least_G1
    num_least_G1 = num_keys - is_more_GS.sum(1, keepdim=True)
    is_chosen_GS = is_more_GS | (is_least_GS & (is_least_GS.cumsum(1) <= num_least_G1))
    return is_chosen_GS.nonzero()[:, 1].int().view(len(scores_GS), num_keys)


def by_kv_head(q_TNH: Tensor, num_kv_heads: int) -> Tensor:
    """Return the queries multiplied by 1 / sqrt(H) and grouped by kv head: fp32 `[G, J, T, H]`, where J = N / G is the
    number of heads that share a kv head. The products of the result with keys are the inputs of the softmax."""
    num_tokens, _, head_dim = q_TNH.shape
    q_TGJH = q_TNH.float().mul(head_dim**-0.5).view(num_tokens, num_kv_heads, -1, head_dim)
    return q_TGJH.permute(1, 2, 0, 3)
