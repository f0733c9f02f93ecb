"""Residency `window`: attends to the first and the latest keys (StreamingLLM; Xiao et al., 2024).

This is a Residency for `engine.model_runner` that serves as a comparison for InfiniGen. It never reads keys outside its
window. The parameters that `baton prepare` wrote for the model (`Selection`) set the size of the window: the number of
latest keys is the maximum number of keys that other policies select by score, but at least `num_last`. The window also
contains the first `num_first` keys. Keys keep their positions in the text, because all keys are still stored. In the
paper, keys get new positions within the window.

B sequences with one new token, N heads, G kv heads, H head dim, K maximum number of selected keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.modeling.forward.selection import Picks, Selection
from baton.types import KvLayout, TokenRange
from baton_lab.comparators.traits import WINDOW
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory
from generate_workers.residency.sparse.selective import SelectiveRow, SelectiveStep
from generate_workers.residency.steps import RowResidency


class WindowStep(SelectiveStep[SelectiveRow]):
    """Step that selects the first and the latest keys of each sequence. The selection is the same in all layers."""

    def __init__(self, layout: KvLayout, rows: Sequence[tuple[SelectiveRow, TokenRange]], selection: Selection) -> None:
        super().__init__(layout, rows)
        self._picks = first_and_last(self.lengths_B, selection, layout.num_kv_heads) if self.choosing else None

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        assert self._picks is not None, "no sequence selects keys"
        return self._picks


class WindowResidency(RowResidency[SelectiveRow]):
    """Residency that attends to the first and the latest keys of each sequence."""

    traits = WINDOW

    def __init__(self, shape: KvShape, make_memory: MakeMemory, selection: Selection) -> None:
        """Create the residency for all slots. Raises an error in OUT_OF_MEMORY if the slots' address space cannot be
        allocated."""
        rows = [SelectiveRow(shape, make_memory) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: WindowStep(shape.layout, rows, selection))


def num_latest(num_tokens: int, selection: Selection) -> int:
    """Return the number of latest keys in the window of a sequence of `num_tokens` tokens. The result may be larger
    than `num_tokens`; the caller limits it."""
    return max(selection.most_by_score(num_tokens), selection.num_last)


def first_and_last(lengths_B: Tensor, selection: Selection, num_kv_heads: int) -> Picks:
    """Return the positions of the keys in each sequence's window: the first `selection.num_first` keys and the latest
    `num_latest` keys. They are the same for all kv heads. `lengths_B`: number of tokens of each sequence, int32."""
    latest_B = torch.tensor([num_latest(length, selection) for length in lengths_B.tolist()], dtype=torch.int32)
    num_B = (latest_B + selection.num_first).minimum(lengths_B)
    at_K = torch.arange(int(num_B.max()), dtype=torch.int32)
    left_out_B1 = (lengths_B - num_B).unsqueeze(1)
    keys_BK = torch.where(at_K < selection.num_first, at_K, at_K + left_out_B1)
    shape_BGK = (len(lengths_B), num_kv_heads, len(at_K))
    num_BG = num_B.unsqueeze(1).expand(-1, num_kv_heads)
    return Picks(keys_BK.unsqueeze(1).expand(shape_BGK).contiguous(), num_BG.contiguous())
