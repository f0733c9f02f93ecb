"""How positions enter a model: a table made once, and what one forward takes from it.

`decoder` looks positions up for each forward. Positions enter in one of two places: they turn queries and keys (RoPE,
`modeling.forward.rope`), or they are added to the input of the first layer (learned positions). A scheme does nothing
in the other place.

Legend: T tokens, D hidden, N heads, H head dim, P positions.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Positions(Protocol):
    """The positions of one forward's tokens, ready to apply."""

    def enter(self, hidden_TD: Tensor) -> None:
        """Add what depends on positions to the embeddings, in place; called once a forward."""

    def turn(self, x_TNH: Tensor, layer: int) -> Tensor:
        """Return queries or keys as attention compares them in `layer`, perhaps `x_TNH` itself, changed."""


class PositionTable(Protocol):
    """What a model keeps of all positions of its context."""

    def lookup(self, positions_T: Tensor) -> Positions:
        """Return the positions of the given tokens; each must be below the model's context."""


@dataclass(frozen=True)
class LearnedPositions:
    """Rows of a table that was trained with the model."""

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
