"""Correction of nominal rates, learnt from finished jobs of ranks. Also used for other durations that are estimates
until they have been observed.

Nominal costs can be wrong by a factor, which is nearly the same for all prompts of a model, and they lack the fixed
time of a job: messages, threads that wake. So two numbers correct them:

    factor      the median over the longer recent jobs, weighted by predicted seconds, of observed over nominal seconds
    fixed part  the least time by which one of the shorter jobs exceeded its prediction times the factor

At first nominal rates count as if one job had confirmed them. A first prompt of a few tokens, whose time is mostly the
fixed part, then does not change the prediction for long ones. It does if it was faster than predicted, which no fixed
part explains. Jobs are never compared with corrected costs, so corrections do not accumulate. A job counts only on
ranks that served no later job meanwhile, because only there its time is its own. Pure.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from baton.results.prefill_trace import RankTiming
from baton.types import TokenRange

_NUM_RECENT = 16
"""Number of recent jobs over which the median is taken."""
_PASSED_OVER = 64
"""Consecutive decisions against the option that this pace predicts, after which its oldest observation is forgotten."""
_MOST = 32.0
"""Largest factor by which one job may count as slower, or faster, than predicted."""

PredictRanks = Callable[[Sequence[TokenRange]], Sequence[float]]
"""Returns the nominal seconds that each rank computes, from the chunks in rank order."""


def computed_s(rank: RankTiming) -> float:
    """Return the seconds that a rank took for its part, without waits for earlier ranks' KV."""
    return (rank.end_ns - rank.start_ns) / 1e9 - rank.wait_s


class Pace:
    """Estimate of the ranks' speed from finished jobs. Deterministic: it depends only on the observations."""

    def __init__(self, believed_s: float = 0.0) -> None:
        """`believed_s`: predicted seconds of an assumed job that took exactly as long as predicted; 0 for none. It
        counts until sixteen jobs have been observed."""
        self._supposed = believed_s, believed_s
        self._recent: deque[tuple[float, float]] = deque([self._supposed] if believed_s else [], maxlen=_NUM_RECENT)
        """(observed seconds, predicted seconds) of recent jobs."""
        self._num_passed_over = 0
        """Decisions against this pace's option since the latest observation, or since one was forgotten."""
        self._latest_ns: dict[Hashable, int] = {}
        """Start of the latest known job, by group and rank, in unix nanoseconds."""

    def __len__(self) -> int:
        """Return the number of observed jobs that the estimate is based on."""
        return sum(job != self._supposed for job in self._recent)

    @property
    def fixed_s(self) -> float:
        """Seconds that a job takes in addition to its prediction times `factor`; 0 when no short job was observed."""
        factor, long_s = self.factor, self._long_s
        short = [
            observed_s - factor * predicted_s
            for observed_s, predicted_s in self._recent
            if predicted_s < long_s and (observed_s, predicted_s) != self._supposed
        ]
        return max(min(short, default=0.0), 0.0)

    @property
    def factor(self) -> float:
        """Factor by which ranks are slower than predicted; 1 when nothing was observed."""
        long_s = self._long_s
        found = _median_ratio([job for job in self._recent if job[1] >= long_s])
        return min(found, _median_ratio([job for job in self._recent if job != self._supposed], nothing=found))

    def observe(self, group: Hashable, ranks: Sequence[RankTiming], predict: PredictRanks) -> None:
        """Record a job that `group` has done. Only its fastest rank, relative to the prediction, counts: the others may
        have worked for earlier jobs while this one waited."""
        in_order = sorted(ranks, key=lambda rank: rank.tokens.start)
        predicted_s = predict([rank.tokens for rank in in_order])
        ratios = [
            (computed_s(rank) / seconds, computed_s(rank), seconds)
            for rank, seconds in zip(in_order, predicted_s, strict=True)
            if seconds > 0 and self._latest_ns.get((group, rank.rank), 0) <= rank.start_ns < rank.end_ns
        ]
        for rank in ranks:
            place = (group, rank.rank)
            self._latest_ns[place] = max(self._latest_ns.get(place, 0), rank.start_ns)
        if ratios:
            self.note(*min(ratios)[1:])

    def note(self, observed_s: float, predicted_s: float) -> None:
        """Record something that took `observed_s`; `predicted_s` is the prediction without correction."""
        if predicted_s > 0:
            self._num_passed_over = 0
            self._recent.append((observed_s, predicted_s))

    def pass_over(self) -> None:
        """Record a decision against the option that this pace predicts. While such decisions continue, observations
        are forgotten one by one; otherwise an option that was slow once would never be tried again."""
        self._num_passed_over += 1
        if self._num_passed_over >= _PASSED_OVER:
            self._num_passed_over = 0
            if len(self):  # the assumed job is not an observation, and stays
                del self._recent[1 if self._recent[0] == self._supposed else 0]

    @property
    def _long_s(self) -> float:
        """Least predicted seconds of a job that counts as long: half of the longest job's."""
        return max((predicted_s for _, predicted_s in self._recent), default=0.0) / 2


def _median_ratio(jobs: Sequence[tuple[float, float]], nothing: float = 1.0) -> float:
    """Return the median, weighted by predicted seconds, of observed over predicted seconds; `nothing` without jobs."""
    ascending = sorted(
        (min(max(observed_s / predicted_s, 1 / _MOST), _MOST), predicted_s) for observed_s, predicted_s in jobs
    )
    left_s = sum(seconds for _, seconds in ascending) / 2
    for ratio, seconds in ascending:
        left_s -= seconds
        if left_s <= 0:
            return ratio
    return nothing
