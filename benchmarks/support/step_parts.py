"""Parts of a generation step's time: a clock that separates them, and what it measured in a benchmark's rounds."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from rich.table import Table


class Part(StrEnum):
    """A part of a step's time."""

    TRANSFER = "transfer"
    """Waiting for copies over the link, in both directions."""
    POLICY = "policy"
    """The policy's own work: guessing and choosing keys, keeping account of hot keys, weighing keys, unpacking, asking
    for transfers, entering and leaving the step."""
    ATTENTION = "attention"
    LINEAR = "linear"
    """Projections, MLP and output head, with norms, positions, and writing the new tokens' KV."""


class PartClock:
    """Adds up the seconds of each part of the steps of one thread.

    Each moment counts for the part that was entered last, but what a policy calls in a turn of its own is the policy's,
    such as the projection by which it guesses queries. Waiting for a transfer is the transfer's wherever it happens.
    Entering and leaving a part costs about a microsecond.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` returns the time in seconds."""
        self._now = now
        self._spent = dict.fromkeys(Part, 0.0)
        self._running: Part | None = None
        self._since_s = 0.0

    @property
    def spent_s(self) -> Mapping[Part, float]:
        """Return the seconds of each part so far, of calls that have ended."""
        return dict(self._spent)

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Count the time inside for `part`, or for the policy in whose turn this is called."""
        outer = self._running
        self._turn_to(outer if outer is Part.POLICY and part is not Part.TRANSFER else part)
        try:
            yield
        finally:
            self._turn_to(outer)

    def _turn_to(self, part: Part | None) -> None:
        now_s = self._now()
        if self._running is not None:
            self._spent[self._running] += now_s - self._since_s
        self._running, self._since_s = part, now_s


@dataclass(frozen=True)
class Breakdown:
    """Where the time of one policy's steps went, round by round."""

    policy: str
    plain_ms: Sequence[float]
    """Milliseconds of steps whose parts were not timed, in the same rounds."""
    timed_ms: Sequence[float]
    """Milliseconds of steps whose parts were timed."""
    parts_ms: Sequence[Mapping[Part, float]]
    """Milliseconds of each part of the timed steps."""

    @property
    def other_ms(self) -> list[float]:
        """Return the milliseconds of each round's timed steps that are in no part."""
        return [step - sum(parts.values()) for step, parts in zip(self.timed_ms, self.parts_ms, strict=True)]

    @property
    def other_share(self) -> float:
        """Return the median fraction of a timed step that is in no part."""
        return statistics.median(other / step for other, step in zip(self.other_ms, self.timed_ms, strict=True))

    @property
    def times_plain(self) -> float:
        """Return how many times as long a timed step takes as one that is not, in the median of the rounds."""
        return statistics.median(timed / plain for timed, plain in zip(self.timed_ms, self.plain_ms, strict=True))

    def medians_ms(self) -> dict[str, float]:
        """Return the median milliseconds of each part by name, and of the rest as `other`."""
        parts = {part.value: statistics.median(parts[part] for parts in self.parts_ms) for part in Part}
        return parts | {"other": statistics.median(self.other_ms)}


def breakdown_table(title: str, breakdowns: Sequence[Breakdown]) -> Table:
    """Return a table with a line for each policy and a column for each part, in milliseconds of a step."""
    table = Table("policy", *Part, "other", "step", "untimed", title=title)
    for each in breakdowns:
        steps = (*each.medians_ms().values(), statistics.median(each.timed_ms), statistics.median(each.plain_ms))
        table.add_row(each.policy, *(f"{ms:.2f}" for ms in steps))
    return table
