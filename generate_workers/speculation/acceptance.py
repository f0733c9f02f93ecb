"""Estimates of how often a source's drafts are accepted, per sequence and for all sequences, for planning rounds. An
estimate is the probability that a draft is accepted if all drafts before it in the round were accepted: A / (A + R),
where A is the number of accepted drafts, and R the number of rounds that ended with a rejected draft. The latest drafts
have most weight. A sequence's estimate uses its own drafts of a kind, and begins with the estimate for all sequences.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from generate_workers.engine.rows import Row

_KEPT_SHARE = 0.95
"""Fraction of a count that is kept after each further round."""
_FORGOTTEN_SHARE = 0.01
"""Fraction of a count that is removed in each round, with or without drafts of its kind."""
_PRIOR_DRAFTS = 4.0
"""Weight of the estimate for all sequences in a sequence's own estimate, as a number of drafts."""


@dataclass
class _Count:
    """Decaying counts of accepted and rejected drafts."""

    num_accepted: float = 0.0
    num_rejected: float = 0.0

    def add(self, num_accepted: int, num_rejected: int, kept_share: float) -> None:
        self.fade(kept_share)
        self.num_accepted += num_accepted
        self.num_rejected += num_rejected

    def fade(self, kept_share: float) -> None:
        self.num_accepted *= kept_share
        self.num_rejected *= kept_share

    def share(self, prior: float) -> float:
        """Return the estimated fraction of accepted drafts, which is `prior` if no drafts are counted."""
        total = self.num_accepted + self.num_rejected + _PRIOR_DRAFTS
        return (self.num_accepted + _PRIOR_DRAFTS * prior) / total


@dataclass
class Acceptances:
    """Acceptance estimates of one draft source."""

    expected: Mapping[int, float]
    """Initial estimate for each kind of drafts."""
    _all: defaultdict[int, _Count] = field(default_factory=lambda: defaultdict(_Count))
    """Counts of all sequences' drafts, by kind."""
    _rows: defaultdict[Row, defaultdict[int, _Count]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(_Count))
    )

    def of(self, row: Row, kind: int = 0) -> float:
        """Return the probability that the sequence's next draft of this kind is accepted. Call this once per round:
        each call slightly reduces the weight of past drafts, so that a kind with few accepted drafts is tried again
        after a while."""
        self._all[kind].fade(1 - _FORGOTTEN_SHARE / 16)
        self._rows[row][kind].fade(1 - _FORGOTTEN_SHARE)
        return self._rows[row][kind].share(self._all[kind].share(self.expected[kind]))

    def took(self, row: Row, num_accepted: int, num_drafts: int, kind: int = 0) -> None:
        """Record that the first `num_accepted` of a sequence's `num_drafts` drafts were accepted. The sequence may have
        ended in this round."""
        num_rejected = int(num_accepted < num_drafts)
        if row.batch_slot is not None:
            self._rows[row][kind].add(num_accepted, num_rejected, _KEPT_SHARE)
        self._all[kind].add(num_accepted, num_rejected, 1 - (1 - _KEPT_SHARE) / 16)

    def forget(self, row: Row) -> None:
        """Drop the counts of a sequence."""
        self._rows.pop(row, None)
