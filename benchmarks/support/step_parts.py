"""Parts of a generation step's time: a clock that separates them, and their measurements over a benchmark's rounds."""

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
    """The policy's own work: predicting and selecting keys, tracking hot keys, weighing keys, unpacking, starting
    transfers, entering and leaving the step."""
    ATTENTION = "attention"
    LINEAR = "linear"
    """Projections, MLP and output head, with norms, positions, and writing the new tokens' KV."""


class PartClock:
    """Adds up the seconds of each part of one thread's steps.

    Time counts for the part that was entered last. Exceptions: everything that a policy calls from its layer hooks
    counts for the policy, such as the projection for predicted queries; and waiting for a transfer always counts for
    the transfer. Entering and leaving a part costs about a microsecond.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now`: function that returns the time in seconds."""
        self._now = now
        self._spent = dict.fromkeys(Part, 0.0)
        self._running: Part | None = None
        self._since_s = 0.0

    @property
    def spent_s(self) -> Mapping[Part, float]:
        """Return the seconds of each part so far, in calls that have ended."""
        return dict(self._spent)

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Count the time inside the block for `part`, or for the policy if it is called from the policy's layer
        hook."""
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
    """Parts of the time of one policy's steps, by round."""

    policy: str
    plain_ms: Sequence[float]
    """Milliseconds of untimed steps in the same rounds."""
    timed_ms: Sequence[float]
    """Milliseconds of timed steps."""
    parts_ms: Sequence[Mapping[Part, float]]
    """Milliseconds of each part of the timed steps."""

    @property
    def other_ms(self) -> list[float]:
        """Return the milliseconds of each round's timed steps that are outside of all parts."""
        return [step - sum(parts.values()) for step, parts in zip(self.timed_ms, self.parts_ms, strict=True)]

    @property
    def other_share(self) -> float:
        """Return the median fraction of a timed step that is outside of all parts."""
        return statistics.median(other / step for other, step in zip(self.other_ms, self.timed_ms, strict=True))

    @property
    def times_plain(self) -> float:
        """Return the median ratio of a timed step to an untimed one."""
        return statistics.median(timed / plain for timed, plain in zip(self.timed_ms, self.plain_ms, strict=True))

    def medians_ms(self) -> dict[str, float]:
        """Return the median milliseconds of each part by name, and of the rest as `other`."""
        parts = {part.value: statistics.median(parts[part] for parts in self.parts_ms) for part in Part}
        return parts | {"other": statistics.median(self.other_ms)}


def breakdown_table(title: str, breakdowns: Sequence[Breakdown]) -> Table:
    """Return a table with one line per policy and one column per part, in milliseconds per step."""
    table = Table("policy", *Part, "other", "step", "untimed", title=title)
    for each in breakdowns:
        steps = (*each.medians_ms().values(), statistics.median(each.timed_ms), statistics.median(each.plain_ms))
        table.add_row(each.policy, *(f"{ms:.2f}" for ms in steps))
    return table
