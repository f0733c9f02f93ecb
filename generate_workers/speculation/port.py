"""Port of drafting: guesses of the tokens that a sequence samples next, which cost less than a step of the model.

`speculator` requests drafts before a step, which verifies them (`engine.verified`).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft


class DraftRequest(NamedTuple):
    """Request for drafts: a decoding sequence, and the largest number of tokens to draft for it."""

    row: Row
    num_drafts: int
    num_keys: int = 0
    """Number of keys that the draft steps of this sequence attend to, from the DraftOption that was chosen."""


class DraftOption(NamedTuple):
    """Drafts that a Proposer can make for a sequence now."""

    num_drafts: int
    kind: int = 0
    """Kind of the drafts. Drafts of the same kind are expected to be accepted equally often."""
    num_keys: int = 0
    """Number of keys that each draft step attends to; 0 for drafts without a step."""


class Proposer(Protocol):
    """Makes drafts for sequences of the batch. Owned by the engine's thread."""

    def offers(self, row: Row, wished: int) -> Sequence[DraftOption]:
        """Return the options to draft at most `wished` tokens for the sequence now. The first option is the configured
        one. The list is empty if no draft can be made."""
        ...

    def prepare(self, rows: Sequence[Row]) -> None:
        """Compute missing state that the sequences' next drafts need. Called right before `draft`, with the same
        sequences. Its duration does not count as time of draft steps, because a sequence's first round may take far
        longer."""
        ...

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the draft of each sequence: the tokens that may follow its known ones, at most `num_drafts`, perhaps
        none. The sequences do not change, except that KV after their known tokens may be overwritten."""
        ...

    def forget(self, row: Row) -> None:
        """Drop all state of a sequence that releases its slot."""
        ...
