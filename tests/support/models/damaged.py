"""A model with one damaged weight, as by a flipped bit: the logits of sequences that contain a certain token are
NaN."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder, Step

DAMAGED = 94
"""Id of the token whose embedding is NaN."""


class DamagedDecoder(Decoder):
    """Decoder whose embedding of the token DAMAGED is NaN."""

    def embed(self, token_ids: Sequence[int] | Tensor, step: Step) -> Tensor:
        hidden_TD = super().embed(token_ids, step)
        return hidden_TD.masked_fill((torch.tensor(token_ids) == DAMAGED).unsqueeze(1), math.nan)
