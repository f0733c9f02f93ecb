"""Estimates of the probability that drafts are accepted, per sequence and for all sequences, for planning rounds.

A round drafts tokens for a sequence and verifies them. An estimate is the probability that a draft is accepted if all
earlier drafts of the round were accepted: A / (A + R). A is the number of accepted drafts, and R is the number of
rounds that ended with a rejected draft. The latest drafts have the most weight. The estimate for a sequence and a kind
of drafts is computed from the sequence's own drafts of this kind. Its initial value is the estimate for all sequences.

Shape suffixes: R sequences that can exist at the same time, B sequences of a step, M kinds of drafts, K options of a
sequence. The first dimension of counts has two entries: accepted and rejected drafts.
"""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.planning.speculation import Floats, Ints

_KEPT_SHARE = 0.95
"""Factor by which a sequence's counts are multiplied before the drafts of a round are added to them. The counts of all
sequences together decay 16 times more slowly."""
_FORGOTTEN_SHARE = 0.01
"""Fraction by which the counts of accepted and rejected drafts of one sequence, for one kind of drafts, decrease with
each round. The counts of all sequences together decrease by a sixteenth of this fraction for each sequence that has
this kind of drafts."""
_PRIOR_DRAFTS = 4.0
"""Weight of the initial estimate: it counts as much as this number of drafts of the sequence itself."""


class Acceptances:
    """Estimates of how often the drafts of one draft source are accepted. Sequences are numbered from 0."""

    def __init__(self, expected: Sequence[float], num_rows: int) -> None:
        """`expected`: initial estimate of the probability that a draft is accepted, for each kind of drafts. Drafts of
        one kind are expected to be accepted equally often. `num_rows`: maximum number of sequences at the same time."""
        self._expected_M = np.array(expected, np.float64)
        self._counts = array("d", bytes(8 * 2 * (num_rows + 1) * len(expected)))
        """Counts of drafts, which `took` changes one by one, faster than through the following views."""
        counts_RM = np.frombuffer(self._counts).reshape(2, num_rows + 1, len(expected))
        self._rows_RM = counts_RM[:, :num_rows]
        self._all_M = counts_RM[:, num_rows]
        """Counts of the drafts of all sequences."""
        self._estimates_RM = np.zeros((num_rows, len(expected)))

    def update(self, rows_B: Ints, kinds_BK: Ints, is_offered_BK: NDArray[np.bool_], num_rounds: int) -> None:
        """Compute the estimates of these sequences again. `kinds_BK`: kinds of drafts; `is_offered_BK`: True if the
        sequence can get drafts of this kind now. The weight of past drafts of such a kind is reduced by `num_rounds`
        rounds, so that its estimates return towards their initial values. A kind whose drafts were often rejected is
        therefore tried again after a while."""
        num_M = np.bincount(kinds_BK[is_offered_BK], minlength=len(self._expected_M))
        self._all_M *= (1 - _FORGOTTEN_SHARE / 16) ** (num_M * num_rounds)
        self._rows_RM[:, rows_B[:, None], kinds_BK] *= np.where(is_offered_BK, (1 - _FORGOTTEN_SHARE) ** num_rounds, 1)
        prior_M = _share(self._all_M, self._expected_M)
        self._estimates_RM[rows_B] = _share(self._rows_RM[:, rows_B], prior_M)

    def of(self, rows_B: Ints, kinds_BK: Ints) -> Floats:
        """Return the estimates for the given kinds of drafts of each sequence, as computed by the latest `update`."""
        estimates_BK: Floats = self._estimates_RM[rows_B[:, None], kinds_BK]
        return estimates_BK

    def took(self, row: int, kind: int, num_accepted: int, num_drafts: int) -> None:
        """Record that the first `num_accepted` of the `num_drafts` drafts of a sequence were accepted. `row`: number of
        the sequence; -1 for a sequence that has ended in this round. The counts of all sequences together include such
        a sequence."""
        num_kinds, half = len(self._expected_M), len(self._counts) // 2
        whole = half - num_kinds + kind
        own = row * num_kinds + kind if row >= 0 else whole
        for place, kept in ((own, _KEPT_SHARE), (whole, 1 - (1 - _KEPT_SHARE) / 16))[row < 0 :]:
            self._counts[place] = self._counts[place] * kept + num_accepted
            self._counts[half + place] = self._counts[half + place] * kept + (num_accepted < num_drafts)

    def forget(self, row: int) -> None:
        """Drop the counts of a sequence."""
        self._rows_RM[:, row] = 0.0


def _share(counts: Floats, prior: Floats) -> Floats:
    """Return the estimated fraction of accepted drafts. It is `prior` if no drafts are counted, and depends less on
    `prior` the more drafts are counted."""
    share: Floats = (counts[0] + _PRIOR_DRAFTS * prior) / (counts.sum(0) + _PRIOR_DRAFTS)
    return share
