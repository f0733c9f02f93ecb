"""Interface of draft sources. A draft is a guess of the tokens that a sequence samples next. It costs less than a step
of the model.

`speculator` requests drafts before each step. The step verifies them (`engine.verified`).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.planning.speculation import Ints
from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft


class DraftRequest(NamedTuple):
    """Request for drafts: a decoding sequence, and the largest number of tokens to draft for it."""

    row: Row
    num_drafts: int
    num_keys: int = 0
    """Number of keys that the draft steps attend to for this sequence: the `num_keys` of the option that was
    selected. 0 leaves the number to the draft source."""


class DraftOffers(NamedTuple):
    """Options that a Proposer offers for the sequences of a step: K options for each of B sequences, int64 `[B, K]`
    each. The first option is the configured one."""

    num_drafts: Ints
    """Maximum number of drafts. 0: the sequence does not have the option."""
    kinds: Ints
    """Kind of the drafts, counted from 0. Drafts of the same kind are expected to be accepted equally often."""
    num_keys: Ints
    """Number of keys that each draft step attends to; 0 if drafts are made without draft steps."""


class Proposer(Protocol):
    """Draft source for the sequences of the batch. Used only by the engine's thread."""

    def offers(self, rows: Sequence[Row], num_known_B: Ints, most_drafts_B: Ints) -> DraftOffers:
        """Return the options for drafting at most `most_drafts_B` tokens for each of the sequences, which have
        `num_known_B` known tokens. All calls return the same number of options per sequence."""
        ...

    def prepare(self, rows: Sequence[Row]) -> None:
        """Compute state that the sequences' next drafts need and that does not exist yet. Called directly before
        `draft`, with the same sequences. The duration of this call does not count as time of draft steps, because it
        may be much longer in a sequence's first round."""
        ...

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return a draft for each request: tokens that may follow the sequence's known tokens. A draft has at most
        `num_drafts` tokens, and may be empty. The device may still be computing it (`Draft.unread`). The sequences do
        not change, except that KV after their known tokens may be overwritten."""
        ...

    def forget(self, row: Row) -> None:
        """Drop all state of a sequence. Called when the sequence releases its slot."""
        ...
