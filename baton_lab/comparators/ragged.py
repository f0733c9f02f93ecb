"""Key selections for batches whose sequences attend to different numbers of keys.

B sequences with one new token, G kv heads, K maximum number of selected keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.modeling.forward.selection import Picks


def picks_of(rows: Sequence[Tensor]) -> Picks:
    """Combine the selected keys of several sequences into one Picks. `rows`: the selected keys of each sequence, int32
    `[G, K]`. K may differ between sequences."""
    num_heads, most = len(rows[0]), max(keys_GK.shape[1] for keys_GK in rows)
    keys_BGK = torch.zeros(len(rows), num_heads, most, dtype=torch.int32)
    for row, keys_GK in enumerate(rows):
        keys_BGK[row, :, : keys_GK.shape[1]] = keys_GK
    num_B = torch.tensor([keys_GK.shape[1] for keys_GK in rows], dtype=torch.int32)
    return Picks(keys_BGK, num_B.unsqueeze(1).repeat(1, num_heads))
