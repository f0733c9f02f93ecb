"""How much slower ranks are than nominal rates say, by the jobs that they have done; likewise whatever else is only
guessed until it has been seen.

Nominal costs know a processor by its name at best: they can be off by a factor, which is nearly the same for all of a
model's prompts. So one number corrects them: the median, by predicted seconds, of what recent jobs took over what
nominal costs predict for them. Costs that are corrected already are never compared with, so a correction does not feed
on itself; and a job counts only on ranks that served no later one meanwhile, where its time is its own. Pure.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from baton.results import RankTiming
from baton.types import TokenRange

_NUM_RECENT = 16
"""Jobs that the median is taken over."""
_MOST = 32.0
"""Jobs count as this much slower at most, or faster."""

PredictRanks = Callable[[Sequence[TokenRange]], Sequence[float]]
"""Nominal seconds that each rank computes, from the chunks in rank order."""


def computed_s(rank: RankTiming) -> float:
    """Seconds that a rank took for its part, less those in which it waited for earlier ranks' KV."""
    return (rank.end_ns - rank.start_ns) / 1e9 - rank.wait_s


class Pace:
    """What finished jobs tell of the ranks' speed. Deterministic: it depends on nothing but what is observed."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=_NUM_RECENT)
        """(observed over predicted, predicted seconds) of jobs."""
        self._latest_ns: dict[Hashable, int] = {}
        """When the latest job that is known began, by rank."""

    def __len__(self) -> int:
        """Jobs that count."""
        return len(self._recent)

    @property
    def factor(self) -> float:
        """By which ranks are slower than predicted; 1 when nothing was observed."""
        ascending = sorted(self._recent)
        left_s = sum(seconds for _, seconds in ascending) / 2
        for ratio, seconds in ascending:
            left_s -= seconds
            if left_s <= 0:
                return ratio
        return 1.0

    def observe(self, group: Hashable, ranks: Sequence[RankTiming], predict: PredictRanks) -> None:
        """Takes in a job that `group` has done. Of its ranks the one that did best counts: the others may have worked
        for earlier jobs whenever this one waited."""
        in_order = sorted(ranks, key=lambda rank: rank.tokens.start)
        predicted_s = predict([rank.tokens for rank in in_order])
        ratios = [
            (computed_s(rank) / seconds, seconds)
            for rank, seconds in zip(in_order, predicted_s, strict=True)
            if seconds > 0 and self._latest_ns.get((group, rank.rank), 0) <= rank.start_ns < rank.end_ns
        ]
        for rank in ranks:
            place = (group, rank.rank)
            self._latest_ns[place] = max(self._latest_ns.get(place, 0), rank.start_ns)
        if ratios:
            self._note(*min(ratios))

    def note(self, observed_s: float, predicted_s: float) -> None:
        """Takes in something that took so long, and was predicted to, uncorrected."""
        if predicted_s > 0:
            self._note(observed_s / predicted_s, predicted_s)

    def forget_oldest(self) -> None:
        """One job less counts, if any does."""
        if self._recent:
            self._recent.popleft()

    def _note(self, ratio: float, seconds: float) -> None:
        self._recent.append((min(max(ratio, 1 / _MOST), _MOST), seconds))
