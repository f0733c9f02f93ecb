"""Corrects predicted durations by the durations of finished jobs. It is used for prefill ranks whose costs are nominal,
and for other durations that are only estimates before the first observation.

Nominal costs may be wrong by a factor, which is nearly the same for all prompts of a model. They also do not include a
job's fixed time, for messages and for waking threads. Therefore two values correct a prediction:

    factor      weighted median of observed seconds / nominal seconds, with nominal seconds as weights: the smaller one
                of the median over recent long jobs and the median over all recent observed jobs
    fixed part  observed seconds - factor x nominal seconds: the minimum over recent short jobs, at least 0

A job is long if its nominal seconds are at least half of those of the longest recent job. All other jobs are short.

The calculation starts with one assumed job, which took exactly its nominal time. A short first prompt that was slower
than predicted therefore does not change the factor, which applies to long prompts too. It was probably slower because
of its fixed time. A short prompt that was faster than predicted does change the factor, because a fixed time cannot
make a job faster.

Jobs are always compared with nominal costs, so corrections do not accumulate. A job is counted only on ranks that did
not compute a later job at the same time, because the measured time would otherwise include work for the other job. All
functions are pure.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from baton.results.prefill_trace import RankTiming
from baton.types import TokenRange

_NUM_RECENT = 16
"""Maximum number of recent jobs from which `factor` and `fixed_s` are computed."""
_PASSED_OVER = 64
"""Number of consecutive calls of `pass_over` after which a Pace object drops its oldest observation. Each call records
that an option was not chosen because of its predicted duration. An option is for example to fetch cached KV."""
_MOST = 32.0
"""Maximum factor by which one job may count as slower or faster than its prediction."""

PredictRanks = Callable[[Sequence[TokenRange]], Sequence[float]]
"""Function that returns the nominal compute time in seconds of each rank. Its argument holds the chunks of a prompt in
rank order."""


def computed_s(rank: RankTiming) -> float:
    """Return the compute time of a rank in seconds. The time in which the rank waited for KV of earlier ranks is not
    included."""
    return (rank.end_ns - rank.start_ns) / 1e9 - rank.wait_s


class Pace:
    """Estimate of how much slower jobs are than their nominal prediction. It is derived from finished jobs, and depends
    only on these observations."""

    def __init__(self, believed_s: float = 0.0) -> None:
        """Create an estimate without observations. It starts with one assumed job, which took exactly its nominal
        duration of `believed_s` seconds. The assumed job counts until `_NUM_RECENT` jobs have been observed. If
        `believed_s` is 0, no job is assumed."""
        self._supposed = believed_s, believed_s
        self._recent: deque[tuple[float, float]] = deque([self._supposed] if believed_s else [], maxlen=_NUM_RECENT)
        """Recent jobs, each as (observed seconds, predicted seconds). If a job is assumed (`believed_s`), it is the
        first entry, until `_NUM_RECENT` jobs have been observed."""
        self._num_passed_over = 0
        """Number of calls of `pass_over` since the last observation was added or dropped."""
        self._latest_ns: dict[Hashable, int] = {}
        """Start time of the latest known job in unix nanoseconds, by (group, rank)."""

    def __len__(self) -> int:
        """Return the number of observed jobs on which the estimate is based."""
        return sum(job != self._supposed for job in self._recent)

    @property
    def fixed_s(self) -> float:
        """Fixed time of a job in seconds. The corrected prediction of a job is its nominal prediction times `factor`,
        plus this time. 0 if no short job was observed."""
        factor, long_s = self.factor, self._long_s
        short = [
            observed_s - factor * predicted_s
            for observed_s, predicted_s in self._recent
            if predicted_s < long_s and (observed_s, predicted_s) != self._supposed
        ]
        return max(min(short, default=0.0), 0.0)

    @property
    def factor(self) -> float:
        """Factor by which jobs take longer than their nominal prediction. 1 if nothing was observed."""
        long_s = self._long_s
        found = _median_ratio([job for job in self._recent if job[1] >= long_s])
        return min(found, _median_ratio([job for job in self._recent if job != self._supposed], nothing=found))

    def observe(self, group: Hashable, ranks: Sequence[RankTiming], predict: PredictRanks) -> None:
        """Record a finished prefill job of the rank group `group`. `predict` returns the nominal seconds of each rank.

        Only one rank is counted: the fastest one relative to its prediction. The other ranks may have worked for
        earlier jobs while this job waited.
        """
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
        """Record an observed duration of `observed_s` seconds. `predicted_s` is the nominal prediction in seconds,
        without correction. Ignored if `predicted_s` is not above 0."""
        if predicted_s > 0:
            self._num_passed_over = 0
            self._recent.append((observed_s, predicted_s))

    def pass_over(self) -> None:
        """Record that the option whose duration this object predicts (for example, fetching cached KV) was not chosen.
        After `_PASSED_OVER` such decisions in a row, the oldest observation is dropped. Otherwise an option that was
        slow once would never be tried again."""
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
