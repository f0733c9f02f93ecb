"""Drafts looked up in the sequence's own text: the tokens that followed the last few tokens when these occurred before.

No model runs and no KV is read. Drafts are good if a text quotes itself, as summaries do (prompt lookup, Saxena, 2023).
The longer the match, the more likely the next tokens match as well, so the kind of a draft is the length of its match.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft
from generate_workers.speculation.port import DraftOption, DraftRequest

LONGEST = 4
"""Number of tokens of the longest n-gram that is looked up. If it has not occurred before, shorter n-grams are looked
up, down to SHORTEST."""
SHORTEST = 2
KINDS = {2: 0.3, 3: 0.4, 4: 0.6, 8: 0.8, 16: 0.9}
"""Kinds of drafts: the minimum number of matching tokens, and the initial estimate of acceptance for this kind."""


@dataclass
class _Index:
    """Index of a sequence's n-grams: the position after the last occurrence of each."""

    num_indexed: int = 0
    """Position up to which n-grams are indexed: the largest indexed end of an n-gram."""
    behind: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams that end before the last token. N-grams that end with the last token have no continuation
        yet."""
        for end in range(self.num_indexed + 1, len(token_ids)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self.behind[tuple(token_ids[end - size : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids) - 1)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return the position after the previous occurrence of the longest n-gram that ends the tokens; None if no such
        n-gram has occurred."""
        for size in range(LONGEST, SHORTEST - 1, -1):
            place = self.behind.get(tuple(token_ids[-size:]))
            if place is not None:
                return place
        return None


class NgramProposer:
    """Proposer that looks drafts up in the sequence's own tokens, prompt and output."""

    def __init__(self) -> None:
        self._indices: dict[Row, _Index] = {}

    def offers(self, row: Row, wished: int) -> Sequence[DraftOption]:
        """Return an option for the tokens that followed an earlier occurrence of the sequence's last tokens, at most
        `wished`; an empty list if there is no earlier occurrence."""
        place = self._find(row)
        if place is None:
            return []
        token_ids, most = row.token_ids, max(KINDS)
        alike = zip(reversed(token_ids[max(place - most, 0) : place]), reversed(token_ids[-most:]), strict=False)
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], alike))
        return [DraftOption(min(wished, len(token_ids) - place), max(kind for kind in KINDS if kind <= num_same))]

    def prepare(self, rows: Sequence[Row]) -> None:
        """Do nothing: a sequence's tokens are indexed when they are looked up."""

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return, for each sequence, the tokens that followed an earlier occurrence of its last tokens; an empty draft
        if there is no earlier occurrence."""
        return [Draft(self._draft(request.row, request.num_drafts)) for request in draft_requests]

    def forget(self, row: Row) -> None:
        """Drop the index of the sequence."""
        self._indices.pop(row, None)

    def _draft(self, row: Row, num_drafts: int) -> list[int]:
        place = self._find(row)
        return [] if place is None else row.token_ids[place : place + num_drafts]

    def _find(self, row: Row) -> int | None:
        """Return the position after the previous occurrence of the sequence's last tokens; None if they have not
        occurred."""
        index = self._indices.setdefault(row, _Index())
        index.extend(row.token_ids)
        return index.find(row.token_ids)
