"""Residency `oracle`: scores all keys of a sequence, and attends only to the keys with the best scores.

This is a Residency for `engine.model_runner` that serves as a comparison for InfiniGen, which predicts scores. It saves
no time, because it reads all keys. It shows the best quality that a selection of the same size could reach with perfect
predictions. Scores are computed in fp32 from the attention's own queries and the stored keys.

B sequences with one new token, N heads, G kv heads, J = N / G, H head dim, S keys of a sequence, K maximum number of
selected keys.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.modeling.forward.selection import Picks, Selection
from baton.types import KvLayout, TokenRange
from baton_lab.comparators.traits import ORACLE
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory
from generate_workers.residency.sparse.selective import SelectiveRow, SelectiveStep
from generate_workers.residency.steps import RowResidency


class OracleStep(SelectiveStep[SelectiveRow]):
    """Step that scores all keys of a sequence before it selects some."""

    def __init__(self, layout: KvLayout, rows: Sequence[tuple[SelectiveRow, TokenRange]], selection: Selection) -> None:
        super().__init__(layout, rows)
        self._selection = selection

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        lists = []
        for (row, tokens), q_NH in zip(self.choosing, q_BNH, strict=True):
            k_SGH = row.kv(layer, TokenRange(0, tokens.end))[:, 0]
            lists.append(best_keys(true_scores(q_NH, k_SGH), self._selection))
        most = max(len(keys) for keys_G in lists for keys in keys_G)
        keys_BGK = torch.zeros(len(lists), self.layout.num_kv_heads, most, dtype=torch.int32)
        num_BG = torch.empty(keys_BGK.shape[:2], dtype=torch.int32)
        for b, keys_G in enumerate(lists):
            for g, keys in enumerate(keys_G):
                keys_BGK[b, g, : len(keys)] = keys
                num_BG[b, g] = len(keys)
        return Picks(keys_BGK, num_BG)

    def fetch(self, layer: int, picks: Picks, num_bytes: int) -> int:
        """Return the number of bytes of host memory that the step reads in a layer. It includes all keys and values of
        the sequences that select keys, because all keys are scored. Return 0 if attention does not read host memory.
        `num_bytes`, the size of the selected keys and values, is not used."""
        num_all = sum(tokens.end for _, tokens in self.choosing) * self.layout.row_bytes
        return super().fetch(layer, picks, num_all)


class OracleResidency(RowResidency[SelectiveRow]):
    """Residency that scores all keys of a sequence and attends to those with the best scores."""

    traits = ORACLE

    def __init__(
        self, shape: KvShape, make_memory: MakeMemory, selection: Selection, *, reads_home: bool = True
    ) -> None:
        """Create the residency for all slots. `reads_home`: True if attention reads KV directly from host memory. False
        if `make_memory` allocates separate device memory. Device memory then holds all KV, because all keys are scored.
        Raises an error in OUT_OF_MEMORY if the slots' address space cannot be allocated."""
        rows = [SelectiveRow(shape, make_memory, reads_home=reads_home) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: OracleStep(shape.layout, rows, selection))


def true_scores(q_NH: Tensor, k_SGH: Tensor) -> Tensor:
    """Return each key's score minus the best key's score, `[G, S]`; all values are at most 0. The difference is first
    computed for each query head. The value for a kv head is the one closest to 0 among the query heads that share the
    kv head."""
    num_kv_heads, head_dim = k_SGH.shape[1:]
    q_GJH = q_NH.float().view(num_kv_heads, -1, head_dim) * head_dim**-0.5
    scores_GJS = q_GJH @ k_SGH.float().permute(1, 2, 0)
    best_GS: Tensor = (scores_GJS - scores_GJS.amax(-1, keepdim=True)).amax(1)
    return best_GS


def best_keys(scores_GS: Tensor, selection: Selection) -> list[Tensor]:
    """Return the positions of each kv head's selected keys, ascending: the keys with the best scores, and always the
    first `selection.num_first` keys and the last `selection.num_last` keys. If scores are equal, the earlier key is
    selected."""
    num_keys = scores_GS.shape[-1]
    mean = (scores_GS > -selection.alpha).sum(-1).double().mean()
    num_picks = max(min(math.ceil(mean), selection.most_by_score(num_keys)), 1)
    best_GK = scores_GS.sort(dim=-1, descending=True, stable=True).indices[:, :num_picks]
    chosen_GS = torch.zeros(scores_GS.shape, dtype=torch.bool).scatter_(1, best_GK, value=True)
    chosen_GS[:, : selection.num_first] = True
    chosen_GS[:, max(num_keys - selection.num_last, 0) :] = True
    return [chosen_S.nonzero().flatten().int() for chosen_S in chosen_GS]
