"""Position schemes: a table that is made once, and the entries of it that one forward uses.

`decoder` looks positions up for each forward. Positions enter in one of two places: they rotate queries and keys (RoPE,
`baton.modeling.forward.rope`), or they are added to the input of the first layer (learned positions). Each scheme
implements both methods, and one of them does nothing.

Legend: T tokens, D hidden, N heads, H head dim, P positions.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Positions(Protocol):
    """Positions of one forward's tokens, ready to be applied."""

    def enter(self, hidden_TD: Tensor) -> None:
        """Add learned positions to the embeddings, in place. Called once per forward."""

    def turn(self, x_TNH: Tensor, layer: int) -> Tensor:
        """Return queries or keys in the form that attention compares in `layer`. May change `x_TNH` and return it."""


class PositionTable(Protocol):
    """Table of a model for all positions of its context."""

    def lookup(self, positions_T: Tensor) -> Positions:
        """Return the Positions of tokens at `positions_T`. Each position must be below the length of the model's
        context."""


@dataclass(frozen=True)
class LearnedPositions:
    """Rows of a trained position table, for the tokens of one forward."""

    rows_TD: Tensor

    def enter(self, hidden_TD: Tensor) -> None:
        hidden_TD += self.rows_TD

    def turn(self, x_TNH: Tensor, layer: int) -> Tensor:
        return x_TNH


@dataclass(frozen=True)
class LearnedTable:
    """Table with one trained row for each position."""

    rows_PD: Tensor

    def lookup(self, positions_T: Tensor) -> LearnedPositions:
        return LearnedPositions(self.rows_PD[positions_T.to(self.rows_PD.device)])
