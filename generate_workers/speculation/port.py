"""The port of drafting: tokens that a row may come to sample next, guessed at less than a step's cost.

`speculator` asks for drafts before a step, which verifies them (`engine.verified`).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft


class DraftWish(NamedTuple):
    """A row that decodes, and the most tokens to draft for it."""

    row: Row
    num_drafts: int


class Offer(NamedTuple):
    """What a Drafter can draft for a row now."""

    num_drafts: int
    kind: int = 0
    """Drafts of one kind are accepted alike, as far as the Drafter can tell."""


class Drafter(Protocol):
    """Drafts tokens for rows of the batch. Owned by the engine's thread."""

    def offer(self, row: Row, wished: int) -> Offer:
        """Return how many of so many wished drafts the row can have now, and of what kind."""
        ...

    def prepare(self, rows: Sequence[Row]) -> None:
        """Take in what the rows' next drafts need and is not there yet. Called right before `draft`, with its rows. Its
        time does not count as that of draft steps: a row's first round may take far longer than the others."""
        ...

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """Return the draft of each row: tokens that follow its known ones, perhaps fewer than wished for, or none. The
        rows are unchanged; their memory behind the known tokens may hold anything."""
        ...

    def forget(self, row: Row) -> None:
        """Drop what is kept of a row, which has ended."""
        ...
