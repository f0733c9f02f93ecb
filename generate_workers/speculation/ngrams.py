"""Drafts that are copied from the sequence's own text: the tokens that followed an earlier occurrence of its last few
tokens.

No model runs and no KV is read. Drafts are good if a text quotes itself, as summaries do (prompt lookup, Saxena, 2023).
The longer the match, the more likely it is that the next tokens match as well. The kind of a draft is therefore the
length of its match, rounded down to a key of `KINDS`.
"""

from collections.abc import Sequence

import numpy as np

from baton.planning.speculation import Ints
from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft
from generate_workers.speculation.port import DraftOffers, DraftRequest

LONGEST = 4
"""Number of tokens of the longest n-gram that is looked up. If it has not occurred before, shorter n-grams are looked
up, down to SHORTEST."""
SHORTEST = 2
KINDS = {2: 0.3, 3: 0.4, 4: 0.6, 8: 0.8, 16: 0.9}
"""Kinds of drafts. Key: minimum length of the match, i.e. of the text at the sequence's end that also precedes the
copied tokens, in tokens. Value: initial estimate of the probability that such a draft is accepted."""
_LONGEST_FIRST = list(enumerate(KINDS))[::-1]
"""Index of each kind in KINDS and the minimum length of its matches, the longest first."""

_TOKEN_BITS = 24
"""Number of bits of a token id in an n-gram's key."""
_MASKS = [(1 << size * _TOKEN_BITS) - 1 for size in range(LONGEST, SHORTEST - 1, -1)]
"""Bits of the key of an n-gram, for each number of tokens. The longest n-gram is first."""


class _Index:
    """Index of a sequence's n-grams. It maps each n-gram to the position after its last occurrence."""

    def __init__(self) -> None:
        self._num_indexed = 0
        """Number of the sequence's tokens whose n-grams are indexed."""
        self._key = _MASKS[0]
        """Key of the longest n-gram at the end of these tokens: the ids of its tokens, in _TOKEN_BITS bits each.
        Positions before the first token count as tokens with an id that does not occur."""
        self._place: int | None = None
        """Result of the latest call of `find`."""
        self._tables = [(dict[int, int](), mask) for mask in _MASKS]
        """Position after the last occurrence of each n-gram, by its key, for each mask in _MASKS."""

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Find the longest n-gram, of SHORTEST to LONGEST tokens, at the end of `token_ids` that has occurred before.
        Return the position after its latest earlier occurrence; None if no such n-gram has occurred before."""
        end = len(token_ids)
        if end == self._num_indexed:
            return self._place
        key = self._key
        for position in range(self._num_indexed, end - 1):
            key = (key << _TOKEN_BITS | token_ids[position]) & _MASKS[0]
            for behind, mask in self._tables:
                behind[key & mask] = position + 1
        self._key = key = (key << _TOKEN_BITS | token_ids[-1]) & _MASKS[0]
        shortest, mask = self._tables[-1]
        place = shortest.get(key & mask)
        if place is not None:  # else no longer n-gram has occurred, either
            place = next((found for behind, mask in self._tables if (found := behind.get(key & mask)) is not None))
        for behind, mask in self._tables:
            behind[key & mask] = end
        self._num_indexed, self._place = end, place
        return place


class NgramProposer:
    """Proposer (source of drafts) that copies drafts from the sequence's own prompt and output."""

    def __init__(self) -> None:
        self._indices: dict[Row, _Index] = {}

    def offers(self, rows: Sequence[Row], num_known_B: Ints, most_drafts_B: Ints) -> DraftOffers:
        """Return one option: the tokens that followed the previous occurrence of the sequence's last tokens. A sequence
        without a previous occurrence does not have the option."""
        found = list[int]()
        for row in rows:
            place = self._find(row)
            found += (0, 0) if place is None else (row.num_known - place, _kind(row.token_ids, place))
        found_BO = np.array(found, np.int64).reshape(-1, 2)
        num_B1 = np.minimum(found_BO[:, 0], most_drafts_B)[:, None]
        return DraftOffers(num_B1, found_BO[:, 1:], np.zeros_like(num_B1))

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
        if row not in self._indices:
            self._indices[row] = _Index()
        return self._indices[row].find(row.token_ids)


def _kind(token_ids: list[int], place: int) -> int:
    """Return the kind of drafts that are copied from `place`, which is the position after an occurrence of the
    sequence's last tokens."""
    for kind, least in _LONGEST_FIRST:
        if place >= least and token_ids[place - least : place] == token_ids[-least:]:
            return kind
    return 0
