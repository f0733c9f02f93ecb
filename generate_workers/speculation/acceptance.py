"""How often a source's drafts are accepted, for each row and for all: what rounds are planned by.

A row's estimate follows its own drafts of a kind, the latest most, and begins as that of all rows. It is the
probability that a draft is accepted when all before it were: accepted drafts, divided by them and the drafts at which a
round stopped.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from generate_workers.engine.rows import Row

_KEPT_SHARE = 0.95
"""Part of a count that is left after another round."""
_FORGOTTEN_SHARE = 0.01
"""Part of a count that is gone after a round without drafts of its kind."""
_PRIOR_DRAFTS = 4.0
"""Drafts that the estimate of all rows counts as, in a row's own."""


@dataclass
class _Count:
    """Drafts that were accepted and rejected, the latest counted most."""

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
        """Return the part of the drafts that were accepted, beginning at `prior`."""
        total = self.num_accepted + self.num_rejected + _PRIOR_DRAFTS
        return (self.num_accepted + _PRIOR_DRAFTS * prior) / total


@dataclass
class Acceptances:
    """The estimates of one source of drafts."""

    expected: Mapping[int, float]
    """Kinds of drafts, each with the estimate of all rows before any draft."""
    _all: defaultdict[int, _Count] = field(default_factory=lambda: defaultdict(_Count))
    """Drafts of all rows, by kind."""
    _rows: defaultdict[Row, defaultdict[int, _Count]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(_Count))
    )

    def of(self, row: Row, kind: int = 0) -> float:
        """Return the probability that the row's next draft is accepted, if it is of that kind. Called once a round:
        what was seen counts a little less each time, so that a kind that did not pay is tried again in the end."""
        self._all[kind].fade(1 - _FORGOTTEN_SHARE / 16)
        self._rows[row][kind].fade(1 - _FORGOTTEN_SHARE)
        return self._rows[row][kind].share(self._all[kind].share(self.expected[kind]))

    def took(self, row: Row, num_accepted: int, num_drafts: int, kind: int = 0) -> None:
        """Note that of a row's drafts these first ones were accepted; the row may have ended with them."""
        num_rejected = int(num_accepted < num_drafts)
        if row.seat is not None:
            self._rows[row][kind].add(num_accepted, num_rejected, _KEPT_SHARE)
        self._all[kind].add(num_accepted, num_rejected, 1 - (1 - _KEPT_SHARE) / 16)

    def forget(self, row: Row) -> None:
        """Drop what is kept of a row."""
        self._rows.pop(row, None)
