"""How often a source's drafts are accepted, for each row and for all: what rounds are planned by.

A row's estimate follows its own drafts, the latest most, and begins as that of all rows. It is the probability that a
draft is accepted when all before it were: accepted drafts, divided by them and the drafts at which a round stopped.
"""

from dataclasses import dataclass, field

from generate_workers.engine.rows import Row

_KEPT_SHARE = 0.95
"""Part of a count that is left after another round."""
_PRIOR_DRAFTS = 4.0
"""Drafts that the estimate of all rows counts as, in a row's own."""


@dataclass
class _Count:
    """Drafts that were accepted and rejected, the latest counted most."""

    num_accepted: float = 0.0
    num_rejected: float = 0.0

    def add(self, num_accepted: int, num_rejected: int, kept_share: float) -> None:
        self.num_accepted = self.num_accepted * kept_share + num_accepted
        self.num_rejected = self.num_rejected * kept_share + num_rejected

    def share(self, prior: float) -> float:
        """Return the part of the drafts that were accepted, beginning at `prior`."""
        total = self.num_accepted + self.num_rejected + _PRIOR_DRAFTS
        return (self.num_accepted + _PRIOR_DRAFTS * prior) / total


@dataclass
class Acceptances:
    """The estimates of one source of drafts."""

    expected: float
    """Estimate of all rows before any draft."""
    _all: _Count = field(default_factory=_Count)
    _rows: dict[Row, _Count] = field(default_factory=dict)

    def of(self, row: Row) -> float:
        """Return the probability that the row's next draft is accepted."""
        common = self._all.share(self.expected)
        count = self._rows.get(row)
        return common if count is None else count.share(common)

    def took(self, row: Row, num_accepted: int, num_drafts: int) -> None:
        """Note that of a row's drafts these first ones were accepted; the row may have ended with them."""
        num_rejected = int(num_accepted < num_drafts)
        if row.seat is not None:
            self._rows.setdefault(row, _Count()).add(num_accepted, num_rejected, _KEPT_SHARE)
        self._all.add(num_accepted, num_rejected, 1 - (1 - _KEPT_SHARE) / 16)

    def forget(self, row: Row) -> None:
        """Drop what is kept of a row."""
        self._rows.pop(row, None)
