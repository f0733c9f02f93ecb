"""Drafts that are looked up in the row's own text: what followed the last few tokens when they last occurred.

No model runs and no KV is read; strong where a text quotes itself, as summaries do (prompt lookup; Saxena, 2023). The
more tokens are the same in both places, the more likely the next ones are, too: drafts are of one kind by that number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft
from generate_workers.speculation.port import DraftWish, Offer

LONGEST = 4
"""Tokens of the longest n-gram that is looked up; shorter ones, down to SHORTEST, where that has not occurred."""
SHORTEST = 2
KINDS = {2: 0.3, 3: 0.4, 4: 0.6, 8: 0.8, 16: 0.9}
"""Kinds of drafts: by the least number of tokens that are the same, how often drafts may be accepted before any was."""


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

    def offers(self, row: Row, wished: int) -> Sequence[Offer]:
        """Offer the tokens that are known to have followed the row's last ones, at most `wished`."""
        place = self._find(row)
        if place is None:
            return []
        token_ids, most = row.token_ids, max(KINDS)
        alike = zip(reversed(token_ids[max(place - most, 0) : place]), reversed(token_ids[-most:]), strict=False)
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], alike))
        return [Offer(min(wished, len(token_ids) - place), max(kind for kind in KINDS if kind <= num_same))]

    def prepare(self, rows: Sequence[Row]) -> None:
        """Do nothing: a row's tokens are taken in when they are looked up."""

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """Return what followed each row's last tokens when they last occurred; nothing for a row of new tokens."""
        return [Draft(self._draft(wish.row, wish.num_drafts)) for wish in wishes]

    def forget(self, row: Row) -> None:
        """Drop the row's index."""
        self._indices.pop(row, None)

    def _draft(self, row: Row, num_drafts: int) -> list[int]:
        place = self._find(row)
        return [] if place is None else row.token_ids[place : place + num_drafts]

    def _find(self, row: Row) -> int | None:
        """Return the position behind an earlier occurrence of the row's last tokens."""
        index = self._indices.setdefault(row, _Index())
        index.extend(row.token_ids)
        return index.find(row.token_ids)
