"""Correction of predictions by nominal rates, learnt from finished jobs of ranks. Also used for other durations that
are only estimated until they have been observed.

Nominal costs may be wrong by a factor, which is nearly the same for all prompts of a model. They also do not include
the fixed time of a job, for messages and for waking threads. So two numbers correct them:

    factor      the median over the longer recent jobs, weighted by predicted seconds, of observed over nominal seconds
    fixed part  the least time by which one of the shorter jobs exceeded its prediction times the factor

At first, nominal rates count as if one job had confirmed them. So a short first prompt, whose time is mostly the fixed
part, does not change the prediction for long prompts. It does change it if it was faster than predicted, which a fixed
part cannot explain. Jobs are always compared with uncorrected costs, so corrections do not accumulate. A job counts
only on ranks that did not serve a later job at the same time, because otherwise its measured time includes work for the
other job. Pure.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from baton.results.prefill_trace import RankTiming
from baton.types import TokenRange

_NUM_RECENT = 16
"""Number of recent jobs over which the median is taken."""
_PASSED_OVER = 64
"""Number of consecutive decisions against the option that this pace predicts, after which the oldest observation is
dropped."""
_MOST = 32.0
"""Maximum factor by which one job may count as slower or faster than predicted."""

PredictRanks = Callable[[Sequence[TokenRange]], Sequence[float]]
"""Function that returns the nominal seconds that each rank computes, for chunks in rank order."""


def computed_s(rank: RankTiming) -> float:
    """Return the seconds that a rank computed, without waiting for the KV of earlier ranks."""
    return (rank.end_ns - rank.start_ns) / 1e9 - rank.wait_s


class Pace:
    """Estimate of the ranks' speed from finished jobs. Deterministic: it depends only on the observations."""

    def __init__(self, believed_s: float = 0.0) -> None:
        """`believed_s`: predicted seconds of an assumed job that took exactly as long as predicted; 0: no assumed job.
        The assumed job counts until sixteen jobs have been observed."""
        self._supposed = believed_s, believed_s
        self._recent: deque[tuple[float, float]] = deque([self._supposed] if believed_s else [], maxlen=_NUM_RECENT)
        """(observed seconds, predicted seconds) of recent jobs."""
        self._num_passed_over = 0
        """Number of decisions against this pace's option since the latest observation, or since an observation was last
        dropped."""
        self._latest_ns: dict[Hashable, int] = {}
        """Start time of the latest known job, by group and rank, in unix nanoseconds."""

    def __len__(self) -> int:
        """Return the number of observed jobs on which the estimate is based."""
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
        """Record a finished job of `group`. Only the rank that was fastest relative to its prediction counts, because
        the others may have worked for earlier jobs while this one waited."""
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
        """Record that something took `observed_s` seconds. `predicted_s` is the prediction without correction."""
        if predicted_s > 0:
            self._num_passed_over = 0
            self._recent.append((observed_s, predicted_s))

    def pass_over(self) -> None:
        """Record a decision against the option that this pace predicts. After many consecutive decisions, observations
        are dropped one by one. Otherwise an option that was slow once would never be tried again."""
        self._num_passed_over += 1
        if self._num_passed_over >= _PASSED_OVER:
            self._num_passed_over = 0
            if len(self):  # the assumed job is not an observation, and stays
                del self._recent[1 if self._recent[0] == self._supposed else 0]

    @property
    def _long_s(self) -> float:
        """Minimum predicted seconds of a job that counts as long: half of those of the longest job."""
        return max((predicted_s for _, predicted_s in self._recent), default=0.0) / 2


def _median_ratio(jobs: Sequence[tuple[float, float]], nothing: float = 1.0) -> float:
    """Return the median, weighted by predicted seconds, of observed over predicted seconds. Return `nothing` if there
    are no jobs."""
    ascending = sorted(
        (min(max(observed_s / predicted_s, 1 / _MOST), _MOST), predicted_s) for observed_s, predicted_s in jobs
    )
    left_s = sum(seconds for _, seconds in ascending) / 2
    for ratio, seconds in ascending:
        left_s -= seconds
        if left_s <= 0:
            return ratio
    return nothing
