"""Position schemes: a table that is made once, and the entries that one forward takes from it.

`decoder` looks positions up for each forward. Positions enter in one of two places: they rotate queries and keys (RoPE,
`baton.modeling.forward.rope`), or they are added to the input of the first layer (learned positions). A scheme does
nothing in the other place.

Legend: T tokens, D hidden, N heads, H head dim, P positions.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Positions(Protocol):
    """Positions of one forward's tokens, ready to apply."""

    def enter(self, hidden_TD: Tensor) -> None:
        """Add learned positions to the embeddings, in place. Called once per forward."""

    def turn(self, x_TNH: Tensor, layer: int) -> Tensor:
        """Return queries or keys as attention compares them in `layer`. May change and return `x_TNH` itself."""


class PositionTable(Protocol):
    """Table of a model for all positions of its context."""

    def lookup(self, positions_T: Tensor) -> Positions:
        """Return the positions of the given tokens. Each must be below the model's context."""


@dataclass(frozen=True)
class LearnedPositions:
    """Rows of one forward's tokens from a table that was trained with the model."""

    rows_TD: Tensor

    def enter(self, hidden_TD: Tensor) -> None:
        hidden_TD += self.rows_TD

    def turn(self, x_TNH: Tensor, layer: int) -> Tensor:
        return x_TNH


@dataclass(frozen=True)
class LearnedTable:
    """A table with one trained row for each position."""

    rows_PD: Tensor

    def lookup(self, positions_T: Tensor) -> LearnedPositions:
        return LearnedPositions(self.rows_PD[positions_T.to(self.rows_PD.device)])
