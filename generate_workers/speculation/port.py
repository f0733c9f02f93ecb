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
    num_keys: int = 0
    """Keys that its draft steps attend to, as offered."""


class Offer(NamedTuple):
    """What a Drafter can draft for a row now."""

    num_drafts: int
    kind: int = 0
    """Drafts of one kind are accepted alike, as far as the Drafter can tell."""
    num_keys: int = 0
    """Keys that each draft step attends to; 0: drafts take no step."""


class Drafter(Protocol):
    """Drafts tokens for rows of the batch. Owned by the engine's thread."""

    def offers(self, row: Row, wished: int) -> Sequence[Offer]:
        """Return how many of so many wished drafts the row can have now, in one or several ways, of which the first is
        as configured. Empty where it can have none."""
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
