"""A model one of whose weights has a flipped bit: sequences with a certain token have logits that are NaN."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder, Step

DAMAGED = 94
"""The token whose embedding is NaN."""


class DamagedDecoder(Decoder):
    """A decoder whose embedding of DAMAGED is NaN."""

    def embed(self, token_ids: Sequence[int], step: Step) -> Tensor:
        hidden_TD = super().embed(token_ids, step)
        return hidden_TD.masked_fill((torch.tensor(token_ids) == DAMAGED).unsqueeze(1), math.nan)
