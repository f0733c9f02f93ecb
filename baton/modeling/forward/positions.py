"""Position schemes. A scheme has a table for all positions of the context, and looks up the entries that one forward
pass uses.

A scheme works in one of two ways: it rotates queries and keys (RoPE, `baton.modeling.forward.rope`), or it adds learned
positions to the input of the first layer. Each scheme implements both methods of `Positions`, but one of the two does
nothing. `decoder` looks up the positions of each forward pass.

Shape letters: T tokens, D hidden size, N heads, H head dim, P positions.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.modeling.device.sending import to_device


class Positions(Protocol):
    """Position information of the tokens of one forward pass: cosines and sines (RoPE), or learned vectors."""

    def enter(self, hidden_TD: Tensor) -> None:
        """Add learned positions to the embeddings, in place. Called once per forward pass. RoPE does nothing here."""

    def turn(self, x_TNH: Tensor, layer: int) -> Tensor:
        """Return the queries or keys `x_TNH` of `layer` with the positions applied. RoPE rotates them here. Learned
        positions change nothing here. The result may be `x_TNH` itself, changed in place."""


class PositionTable(Protocol):
    """Table with the cosines and sines (RoPE) or the learned vectors of all positions of a model's context."""

    def lookup(self, positions_T: Tensor) -> Positions:
        """Return the table entries (cosines and sines, or learned vectors) for the positions `positions_T`. Each
        position must be below the length of the model's context."""


@dataclass(frozen=True)
class LearnedPositions:
    """Trained position vectors of the tokens of one forward pass."""

    rows_TD: Tensor

    def enter(self, hidden_TD: Tensor) -> None:
        hidden_TD += self.rows_TD

    def turn(self, x_TNH: Tensor, layer: int) -> Tensor:
        return x_TNH


@dataclass(frozen=True)
class LearnedTable:
    """Table with one trained vector for each position."""

    rows_PD: Tensor

    def lookup(self, positions_T: Tensor) -> LearnedPositions:
        return LearnedPositions(self.rows_PD[to_device(positions_T, self.rows_PD.device)])
