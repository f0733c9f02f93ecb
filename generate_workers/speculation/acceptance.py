"""Estimates of the probability that drafts are accepted, per sequence and for all sequences, for planning rounds.

A round drafts tokens for a sequence and verifies them. An estimate is the probability that a draft is accepted if all
earlier drafts of the round were accepted: A / (A + R). A is the number of accepted drafts, and R is the number of
rounds that ended with a rejected draft. The latest drafts have the most weight. The estimate for a sequence and a kind
of drafts is computed from the sequence's own drafts of this kind. Its initial value is the estimate for all sequences.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from generate_workers.engine.rows import Row

_KEPT_SHARE = 0.95
"""Factor by which a sequence's counts are multiplied before the drafts of a round are added to them. The counts of all
sequences together decay 16 times more slowly."""
_FORGOTTEN_SHARE = 0.01
"""Fraction by which each call of `Acceptances.of` reduces the counts of accepted and rejected drafts of one sequence,
for one kind of drafts. The call also reduces the counts of all sequences together for this kind, by a sixteenth of this
fraction."""
_PRIOR_DRAFTS = 4.0
"""Weight of the initial estimate: it counts as much as this number of drafts of the sequence itself."""


@dataclass
class _Count:
    """Counts of accepted and rejected drafts, in which old drafts lose weight."""

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
        """Return the estimated fraction of accepted drafts. It is `prior` if no drafts are counted, and depends less on
        `prior` the more drafts are counted."""
        total = self.num_accepted + self.num_rejected + _PRIOR_DRAFTS
        return (self.num_accepted + _PRIOR_DRAFTS * prior) / total


@dataclass
class Acceptances:
    """Estimates of how often the drafts of one draft source are accepted."""

    expected: Mapping[int, float]
    """Initial estimate of the probability that a draft is accepted, by kind of drafts. Kinds are numbered by the draft
    source; drafts of one kind are expected to be accepted equally often."""
    _all: defaultdict[int, _Count] = field(default_factory=lambda: defaultdict(_Count))
    """Counts of the accepted and rejected drafts of all sequences, by kind of drafts."""
    _rows: defaultdict[Row, defaultdict[int, _Count]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(_Count))
    )

    def of(self, row: Row, kind: int = 0) -> float:
        """Return the probability that the sequence's next draft of this kind is accepted. Must be called once per
        round. Each call slightly reduces the weight of past drafts, so that the estimate returns towards its initial
        value. A kind whose drafts were often rejected is therefore tried again after a while."""
        self._all[kind].fade(1 - _FORGOTTEN_SHARE / 16)
        self._rows[row][kind].fade(1 - _FORGOTTEN_SHARE)
        return self._rows[row][kind].share(self._all[kind].share(self.expected[kind]))

    def took(self, row: Row, num_accepted: int, num_drafts: int, kind: int = 0) -> None:
        """Record that the first `num_accepted` of a sequence's `num_drafts` drafts of kind `kind` were accepted. The
        counts of all sequences together are always updated. The sequence's own counts are updated only if it has not
        ended in this round."""
        num_rejected = int(num_accepted < num_drafts)
        if row.batch_slot is not None:
            self._rows[row][kind].add(num_accepted, num_rejected, _KEPT_SHARE)
        self._all[kind].add(num_accepted, num_rejected, 1 - (1 - _KEPT_SHARE) / 16)

    def forget(self, row: Row) -> None:
        """Drop the counts of a sequence."""
        self._rows.pop(row, None)
