"""Drafts that are copied from the sequence's own text: the tokens that followed an earlier occurrence of its last few
tokens.

No model runs and no KV is read. Drafts are good if a text quotes itself, as summaries do (prompt lookup, Saxena, 2023).
The longer the match, the more likely it is that the next tokens match as well. The kind of a draft is therefore the
length of its match, rounded down to a key of `KINDS`.
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
"""Kinds of drafts. Key: minimum length of the match, i.e. of the text at the sequence's end that also precedes the
copied tokens, in tokens. Value: initial estimate of the probability that such a draft is accepted."""


@dataclass
class _Index:
    """Index of a sequence's n-grams. It maps each n-gram to the position after its last occurrence."""

    num_indexed: int = 0
    """Position up to which n-grams are indexed. All n-grams that end at or before this position are in the index."""
    behind: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the n-grams of `token_ids` to the index, except those that end with the last token. No token follows
        these yet."""
        for end in range(self.num_indexed + 1, len(token_ids)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self.behind[tuple(token_ids[end - size : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids) - 1)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Find the longest n-gram, of SHORTEST to LONGEST tokens, at the end of `token_ids` that has occurred before.
        Return the position after its latest earlier occurrence; None if no such n-gram has occurred before."""
        for size in range(LONGEST, SHORTEST - 1, -1):
            place = self.behind.get(tuple(token_ids[-size:]))
            if place is not None:
                return place
        return None


class NgramProposer:
    """Proposer (source of drafts) that copies drafts from the sequence's own prompt and output."""

    def __init__(self) -> None:
        self._indices: dict[Row, _Index] = {}

    def offers(self, row: Row, wished: int) -> Sequence[DraftOption]:
        """Return one option: the tokens that followed the previous occurrence of the sequence's last tokens, at most
        `wished`. Return an empty list if there is no previous occurrence."""
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
        """Return a draft for each request: the tokens that followed the previous occurrence of the sequence's last
        tokens. A draft is empty if there is no previous occurrence."""
        return [Draft(self._draft(request.row, request.num_drafts)) for request in draft_requests]

    def forget(self, row: Row) -> None:
        """Drop the index of the sequence's n-grams."""
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
