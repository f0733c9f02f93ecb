"""What draft views that choose keys share: the best keys by their scores, and turns that choose.

Engine's thread. B rows of one new token, N heads, G kv heads, H head dim, S keys, K picks at most.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.forward.selection import Picks

Choose = Callable[[int, Tensor], Picks | None]
"""(layer, q_BNH) -> the keys that each row of a draft step attends to in the layer; None: all keys."""


@dataclass(frozen=True)
class ChoosingTurns:
    """LayerTurns of a draft step whose rows choose each layer's keys by that layer's queries."""

    choose: Choose

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Do nothing: all keys are in place."""

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return the keys that the rows choose, which are all of the step's tokens."""
        return self.choose(layer, q_TNH)

    def end(self, layer: int) -> None:
        """Do nothing: new keys stay where they were written."""


def top_keys(scores_GS: Tensor, num_keys: int) -> Tensor:
    """Return the `num_keys` keys with the largest scores of each kv head, ascending, as int32 `[G, num_keys]`; of equal
    scores the earlier key. A score that is NaN counts below all numbers. `num_keys` is at most S."""
    if not num_keys:
        return torch.empty(len(scores_GS), 0, dtype=torch.int32)
    scores_GS = scores_GS.nan_to_num(-math.inf, math.inf, -math.inf)
    least_G1 = scores_GS.topk(num_keys).values[:, -1:]
    is_more_GS, is_least_GS = scores_GS > least_G1, scores_GS == least_G1
    num_least_G1 = num_keys - is_more_GS.sum(1, keepdim=True)
    is_chosen_GS = is_more_GS | (is_least_GS & (is_least_GS.cumsum(1) <= num_least_G1))
    return is_chosen_GS.nonzero()[:, 1].int().view(len(scores_GS), num_keys)


def by_kv_head(q_TNH: Tensor, num_kv_heads: int) -> Tensor:
    """Return queries times 1 / sqrt(H), in fp32, by the kv head that they share: `[G, J, T, H]` for J heads each. Their
    products with keys are what a softmax takes."""
    num_tokens, _, head_dim = q_TNH.shape
    q_TGJH = q_TNH.float().mul(head_dim**-0.5).view(num_tokens, num_kv_heads, -1, head_dim)
    return q_TGJH.permute(1, 2, 0, 3)
