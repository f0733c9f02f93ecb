"""Drafts that are looked up in the row's own text: what followed the last few tokens when they last occurred.

No model runs and no KV is read; strong where a text quotes itself, as summaries do (prompt lookup; Saxena, 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft
from generate_workers.speculation.port import DraftWish

LONGEST = 4
"""Tokens of the longest n-gram that is looked up; shorter ones, down to SHORTEST, where that has not occurred."""
SHORTEST = 2


@dataclass
class _Index:
    """Where a row's n-grams last occurred: the position behind each."""

    num_indexed: int = 0
    """Positions up to which n-grams end that are in `behind`."""
    behind: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the n-grams that end before the last token: the last token's own have no continuation yet."""
        for end in range(self.num_indexed + 1, len(token_ids)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self.behind[tuple(token_ids[end - size : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids) - 1)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return the position behind an earlier occurrence of the longest last n-gram; None where there is none."""
        for size in range(LONGEST, SHORTEST - 1, -1):
            place = self.behind.get(tuple(token_ids[-size:]))
            if place is not None:
                return place
        return None


class NgramDrafter:
    """A Drafter that looks drafts up in the row's own tokens, prompt and output."""

    def __init__(self) -> None:
        self._indices: dict[Row, _Index] = {}

    def most_drafts(self, row: Row, wished: int) -> int:
        """Return how many tokens are known to have followed the row's last ones, at most `wished`."""
        return len(self._draft(row, wished))

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """Return what followed each row's last tokens when they last occurred; nothing for a row of new tokens."""
        return [Draft(self._draft(*wish)) for wish in wishes]

    def forget(self, row: Row) -> None:
        """Drop the row's index."""
        self._indices.pop(row, None)

    def _draft(self, row: Row, num_drafts: int) -> list[int]:
        index = self._indices.setdefault(row, _Index())
        index.extend(row.token_ids)
        place = index.find(row.token_ids)
        return [] if place is None else row.token_ids[place : place + num_drafts]
