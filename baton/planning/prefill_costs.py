"""Estimates the prefill costs of one kind of device from finished jobs, of prefill ranks or of generation groups.

Nominal costs may be wrong, and each rate by a factor of its own. They also do not include a job's fixed time, for
messages and for waking threads. The duration of a job is modelled as

    the larger of a x matrix products + b x attention + c     and     d x launches

The first three are the job's durations under nominal costs, and c is a fixed time. Launches are the minimum duration of
a job whose layers wait for the launch of their kernels; they are 0 on a CPU. The four coefficients are fitted to the
latest jobs by least squares of relative errors. Jobs that deviate much have a small weight, because something else may
have delayed them. Where the jobs leave them open, a and b are the weighted median of observed over nominal seconds, and
d is 1. The median also counts one assumed job with its nominal duration, so that a short first prompt, which took long
because of its fixed time, does not change the predictions for long prompts.

Jobs are always compared with nominal costs, so corrections do not accumulate. Durations are predicted by
`baton.planning.chain.wavefront`.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from baton.planning.chain.wavefront import rank_seconds, work_of
from baton.planning.cost_model import BATON, CostModel
from baton.planning.fit import fit_relative
from baton.planning.pace import MOST_RATIO, NUM_RECENT, PassedOver, median_ratio
from baton.results.prefill_trace import RankTiming
from baton.types import TokenRange

_ASSUMED_TOKENS = 1024
"""Number of tokens of the assumed job."""
_PRIOR_WEIGHT = 0.1
"""Weight of the coefficients that are assumed where the jobs leave them open, relative to that of one job."""
_CLOSE = 0.1
"""Relative error of a job up to which it has its full weight. The weight of other jobs is inversely proportional to
their errors."""
_FITS = 3
"""Number of successive fits. Each uses the weights, and the larger of the two durations, of the fit before it."""
_NEW_JOBS = 4
"""Number of new jobs after which costs are fitted again, if the number of known jobs is the maximum."""
_TINY_S = 1e-30
"""Seconds that stand for no time where a cost must be above 0."""


class PrefillCosts:
    """Prefill costs of one kind of device, derived from nominal costs and finished jobs. Depends only on these."""

    def __init__(self, nominal: CostModel) -> None:
        """Create an estimate without observations."""
        self._nominal = self._cost = nominal
        self._num_new = 0
        """Number of jobs since the latest fit."""
        self._assumed_s = sum(ranks_s([TokenRange(0, _ASSUMED_TOKENS)], nominal))
        self._jobs: deque[tuple[NDArray[np.float64], float]] = deque(maxlen=NUM_RECENT)
        """Recent jobs: nominal seconds of matrix products, attention, fixed time (1) and launches, and the observed
        seconds."""
        self._passed_over = PassedOver()
        self._latest_ns: dict[Hashable, int] = {}
        """Start time of the latest known job in unix nanoseconds, by (group, rank)."""

    @property
    def cost(self) -> CostModel:
        """Costs that follow from the jobs so far. They are fitted when they are read after `_NEW_JOBS` new jobs, and
        after each of the first jobs."""
        if self._num_new >= (_NEW_JOBS if len(self._jobs) == NUM_RECENT else 1):
            self._num_new = 0
            self._cost = self._fitted()
        return self._cost

    def __len__(self) -> int:
        """Return the number of observed jobs on which the estimate is based."""
        return len(self._jobs)

    def observe(self, group: Hashable, ranks: Sequence[RankTiming]) -> None:
        """Record a finished prefill job of the rank group `group`.

        Only one rank is counted: the fastest one relative to its nominal time. The other ranks may have worked for
        earlier jobs while this job waited. Ranks that computed a later job at the same time are not counted, because
        the measured time would include work for the other job.
        """
        in_order = sorted(ranks, key=lambda rank: rank.tokens.start)
        nominal_s = ranks_s([rank.tokens for rank in in_order], self._nominal)
        ratios = [
            (rank.computed_s / seconds, place)
            for place, (rank, seconds) in enumerate(zip(in_order, nominal_s, strict=True))
            if seconds > 0 and self._latest_ns.get((group, rank.rank), 0) <= rank.start_ns < rank.end_ns
        ]
        for rank in ranks:
            key = (group, rank.rank)
            self._latest_ns[key] = max(self._latest_ns.get(key, 0), rank.start_ns)
        if ratios:
            _, place = min(ratios)
            self.note([rank.tokens for rank in in_order], place, in_order[place].computed_s)

    def note(self, chunks: Sequence[TokenRange], place: int, seconds: float) -> None:
        """Record that the rank at position `place` of a chain computed its chunk in `seconds`. `chunks` has one range
        of tokens for each rank."""
        nominal, nothing = self._nominal, replace(self._nominal, linear_s=_TINY_S, pair_s=0.0, fixed_s=0.0, issue_s=0.0)
        products = replace(nothing, linear_s=max(nominal.linear_s, _TINY_S), fixed_s=nominal.fixed_s)
        parts = products, replace(nothing, pair_s=nominal.pair_s), replace(nothing, issue_s=nominal.issue_s)
        linear, pair, launch = (ranks_s(chunks, part)[place] for part in parts)
        job = np.array([linear, pair, 1.0, launch])
        nominal_s = max(linear + pair, launch)
        if nominal_s > 0 and seconds > 0:
            self._passed_over.reset()
            self._jobs.append((job, min(max(seconds, nominal_s / MOST_RATIO), nominal_s * MOST_RATIO)))
            self._num_new += 1

    def pass_over(self) -> None:
        """Record that a prefill on this kind of device was not chosen because of its predicted duration. After many
        such decisions in a row, the oldest job is dropped. Otherwise a device that was slow once would never be tried
        again."""
        if self._passed_over.count() and self._jobs:
            self._jobs.popleft()
            self._num_new = _NEW_JOBS

    def _fitted(self) -> CostModel:
        """Return the costs that fit the recent jobs."""
        nominal, known = self._nominal, tuple(self._jobs)  # a copy, as another thread may be the one that adds jobs
        if not known:
            return nominal
        jobs_NC, seconds_N = np.array([job for job, _ in known]), np.array([seconds for _, seconds in known])
        factors = [1.0, 1.0, 0.0, 1.0]
        weights_N = np.ones(len(seconds_N))
        for _ in range(_FITS):
            is_launch_N = jobs_NC[:, 3] * factors[3] > jobs_NC[:, :3] @ factors[:3]
            ratio = self._ratio(jobs_NC[~is_launch_N], seconds_N[~is_launch_N])
            columns_NC = np.where(is_launch_N[:, None], jobs_NC * [0, 0, 0, 1], jobs_NC * [1, 1, 1, 0])
            prior_PC, prior_P = np.diag([1.0, 1.0, 0.0, 1.0])[[0, 1, 3]], np.array([ratio, ratio, 1.0])
            factors, _ = fit_relative(
                np.concatenate((columns_NC, prior_PC)),
                np.concatenate((seconds_N, prior_P)),
                np.concatenate((weights_N, np.full(3, _PRIOR_WEIGHT))),
            )
            errors_N = np.abs(columns_NC @ factors / seconds_N - 1)
            weights_N = _CLOSE / np.maximum(errors_N, _CLOSE)
        linear, pair, fixed_s, launch = factors
        return replace(
            nominal,
            linear_s=max(linear * nominal.linear_s, _TINY_S),
            pair_s=pair * nominal.pair_s,
            fixed_s=linear * nominal.fixed_s + fixed_s / nominal.num_layers,
            issue_s=launch * nominal.issue_s,
            head_s=linear * nominal.head_s,
            copy_s=linear * nominal.copy_s,
        )

    def _ratio(self, jobs_NC: NDArray[np.float64], seconds_N: NDArray[np.float64]) -> float:
        """Return the median of observed over nominal seconds, weighted by nominal seconds. It counts the assumed job
        until the number of jobs is the maximum."""
        known = [(float(seconds), float(job[:2].sum())) for job, seconds in zip(jobs_NC, seconds_N, strict=True)]
        if len(self._jobs) < NUM_RECENT:
            known.append((self._assumed_s, self._assumed_s))
        return median_ratio(known)


def ranks_s(chunks: Sequence[TokenRange], cost: CostModel) -> tuple[float, ...]:
    """Return the compute time in seconds of each rank of a chain for all layers, with these costs. `chunks` has one
    range of tokens for each rank. Waits and other costs of a request are not included."""
    lengths = np.array([[len(each) for each in chunks]], dtype=np.float64)
    work = work_of(lengths, cost, BATON, chunks[0].start)
    is_last = np.arange(len(chunks)) == len(chunks) - 1
    return tuple(float(each) for each in rank_seconds(work, is_last, cost, BATON)[0])
