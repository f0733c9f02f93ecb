"""How a model knows where its tokens stand: a table made once, and what one forward takes from it.

Positions enter in one of two places: they turn queries and keys (RoPE, `modeling.forward.rope`), or they are added to
the hidden states that the first layer sees (learned positions). A scheme does nothing in the other place.

Legend: T tokens, D hidden, N heads, H head dim, P positions.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Positions(Protocol):
    """Where the tokens of one forward stand."""

    def enter(self, hidden_TD: Tensor) -> None:
        """Adds what depends on positions to the embeddings, in place; once a forward."""
        ...

    def turn(self, x_TNH: Tensor) -> Tensor:
        """Queries or keys as attention shall compare them; every layer. May be done in place: the result is `x_TNH`."""
        ...


class PositionTable(Protocol):
    """What a model knows of all positions of its context."""

    def lookup(self, positions_T: Tensor) -> Positions:
        """Those of the given tokens; each must be below the model's context."""
        ...


@dataclass(frozen=True)
class LearnedPositions:
    """Rows of a table that was trained with the model."""

    rows_TD: Tensor

    def enter(self, hidden_TD: Tensor) -> None:
        hidden_TD += self.rows_TD

    def turn(self, x_TNH: Tensor) -> Tensor:
        return x_TNH


@dataclass(frozen=True)
class LearnedTable:
    """One trained row a position."""

    rows_PD: Tensor

    def lookup(self, positions_T: Tensor) -> LearnedPositions:
        return LearnedPositions(self.rows_PD[positions_T.to(self.rows_PD.device)])
