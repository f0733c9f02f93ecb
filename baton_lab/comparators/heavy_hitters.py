"""Heavy hitters (H2O; Zhang et al., 2023): the keys that a sequence keeps in one layer because they received the most
attention so far.

Used by residency `h2o`, on the engine's thread. Each kept key has a sum: the softmax weights that it got from all
queries of the prompt and of every step. Each kv head of each sequence has its own sums. A kv head's sum adds the
weights of all query heads that share the kv head. (The published code sums over the batch, and does not support shared
kv heads.) A sequence keeps its latest keys, and the earlier keys with the largest sums. All other keys are dropped
permanently. Early keys have larger sums because they got weights from more queries. This bias of H2O is known and is
not corrected here.

G kv heads, J query heads per kv head, H head dim, K kept keys, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.types import TokenRange

_BLOCK = 64
"""Number of queries whose attention weights are computed at once. Limits the memory for the weights."""


@dataclass(frozen=True)
class HeavyBudget:
    """Limit on the keys that a step attends to, as fractions of the prompt's length. As in the published code, the
    number of keys does not grow with the output. Raises ConfigError if a field is out of range."""

    heavy_share: float
    """Number of keys kept for their sums of attention weights, as a fraction of the prompt's length, in [0, 1]."""
    recent_share: float
    """Number of latest keys that are kept, as a fraction of the prompt's length, in (0, 1]. The new token's own key
    counts as one of them. At least 1 key is kept."""

    def __post_init__(self) -> None:
        if not 0 <= self.heavy_share <= 1:
            raise ConfigError(f"heavy_share = {self.heavy_share} is out of range: use a number from 0 to 1")
        if not 0 < self.recent_share <= 1:
            raise ConfigError(f"recent_share = {self.recent_share} is out of range: use a number above 0, up to 1")

    @classmethod
    def halved(cls, share: float) -> "HeavyBudget":
        """Return a budget of the fraction `share` of the prompt's length. Half of it is for heavy hitters and half for
        the latest keys, as in the paper."""
        return cls(share / 2, share / 2)

    def of(self, num_prompt: int) -> tuple[int, int]:
        """Return the maximum number of heavy hitters and the number of latest keys that a step attends to, for a
        sequence with a prompt of `num_prompt` tokens."""
        return int(self.heavy_share * num_prompt), max(int(self.recent_share * num_prompt), 1)


class HeavyHitters:
    """Keys that one sequence keeps in one layer. Each kv head keeps its own keys."""

    def __init__(self, num_kv_heads: int) -> None:
        """Create a state without keys for `num_kv_heads` kv heads."""
        self.positions_GK = torch.zeros((num_kv_heads, 0), dtype=torch.int32)
        """Positions of the kept keys in the sequence, ascending, for each kv head."""
        self.sums_GK = torch.zeros((num_kv_heads, 0))
        """For each kept key, the sum of the softmax weights that it got so far, fp32."""

    @property
    def num_bytes(self) -> int:
        return self.positions_GK.nbytes + self.sums_GK.nbytes

    def take(self, q_TNH: Tensor, k_SGH: Tensor) -> Tensor:
        """Add the last T keys of `k_SGH` to the kept keys. Then add the attention weights of `q_TNH`, the queries of
        the same tokens, to the sums of all kept keys. Return the positions of all kept keys, including the new ones,
        `[G, K]`."""
        first = len(k_SGH) - len(q_TNH)
        self._add(TokenRange(first, len(k_SGH)))
        return self._weigh(q_TNH, self._kept(k_SGH))

    def take_kept(self, q_TNH: Tensor, first: int, k_GKH: Tensor) -> Tensor:
        """Add new keys, at position `first` and later, to the kept keys. Then add the attention weights of `q_TNH`, the
        queries of the same tokens, to the sums of all kept keys. `k_GKH` contains the kept keys and the new keys, but
        no dropped keys. Return the positions of all kept keys, including the new ones, `[G, K]`."""
        self._add(TokenRange(first, first + len(q_TNH)))
        return self._weigh(q_TNH, k_GKH.float())

    def _add(self, tokens: TokenRange) -> None:
        new_GT = torch.arange(tokens.start, tokens.end, dtype=torch.int32).expand(len(self.positions_GK), -1)
        self.positions_GK = torch.cat((self.positions_GK, new_GT), dim=1)
        self.sums_GK = torch.cat((self.sums_GK, torch.zeros(new_GT.shape)), dim=1)

    def _weigh(self, q_TNH: Tensor, k_GKH: Tensor) -> Tensor:
        num_new = len(q_TNH)
        num_old, k_GHK = self.positions_GK.shape[1] - num_new, k_GKH.transpose(1, 2)
        for start in range(0, num_new, _BLOCK):
            block_TNH = q_TNH[start : start + _BLOCK]
            seen = num_old + start + len(block_TNH)
            self.sums_GK[:, :seen] += _weights(block_TNH, k_GHK[:, :, :seen])
        return self.positions_GK

    def drop(self, num_heavy: int, num_recent: int) -> None:
        """Keep the latest `num_recent` keys, and the `num_heavy` earlier keys with the largest sums of attention
        weights. Drop all other keys permanently. If sums are equal, earlier keys are dropped first."""
        num_kept = self.positions_GK.shape[1]
        num_dropped = num_kept - num_recent - num_heavy
        if num_dropped <= 0:
            return
        others_GK = self.sums_GK[:, : num_kept - num_recent]
        least_GD = others_GK.sort(dim=1, stable=True).indices[:, :num_dropped]
        stay_GK = torch.ones(self.sums_GK.shape, dtype=torch.bool).scatter_(1, least_GD, value=False)
        self._keep(stay_GK)

    def _keep(self, stay_GK: Tensor) -> None:
        """Keep the keys marked in `stay_GK`, the same number for each kv head, and drop all other keys."""
        shape = (len(self.positions_GK), -1)
        self.positions_GK = self.positions_GK[stay_GK].view(shape)
        self.sums_GK = self.sums_GK[stay_GK].view(shape)

    def copy_from(self, other: "HeavyHitters") -> None:
        """Copy the state of the same layer of another sequence."""
        self.positions_GK, self.sums_GK = other.positions_GK.clone(), other.sums_GK.clone()

    def _kept(self, k_SGH: Tensor) -> Tensor:
        """Return the kept keys, `[G, K, H]` in fp32."""
        if self.positions_GK.shape[1] == len(k_SGH):
            return k_SGH.transpose(0, 1).float()
        heads_G1 = torch.arange(len(self.positions_GK)).unsqueeze(1)
        return k_SGH[self.positions_GK.long(), heads_G1].float()


def _weights(q_TNH: Tensor, k_GHK: Tensor) -> Tensor:
    """Return the softmax weight of each key, summed over all queries, `[G, K]`. The last T keys belong to the queries,
    and are masked causally."""
    num_queries, num_keys = len(q_TNH), k_GHK.shape[2]
    num_kv_heads, head_dim = k_GHK.shape[:2]
    q_TGJH = q_TNH.float().reshape(num_queries, num_kv_heads, -1, head_dim)
    q_GMH = q_TGJH.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores_GMK = (q_GMH @ k_GHK).mul_(head_dim**-0.5)
    if num_queries > 1:
        later_TT = torch.ones(num_queries, num_queries, dtype=torch.bool).triu(1)
        scores_GJTK = scores_GMK.view(num_kv_heads, -1, num_queries, num_keys)
        scores_GJTK[..., num_keys - num_queries :].masked_fill_(later_TT, -torch.inf)
    weights_GK: Tensor = scores_GMK.softmax(-1).sum(1)
    return weights_GK
