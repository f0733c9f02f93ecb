"""Measures how the time of a generation step is divided into parts: a clock that measures each part, and its results
over the rounds of a benchmark."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from rich.table import Table


class Part(StrEnum):
    """Part of a generation step to which time is attributed."""

    TRANSFER = "transfer"
    """Waiting for copies between host and device, in both directions."""
    POLICY = "policy"
    """Work of the residency policy: predicting, selecting and weighing keys, tracking frequently used keys, unpacking
    KV, starting transfers, and entering and leaving the step."""
    ATTENTION = "attention"
    LINEAR = "linear"
    """Linear layers: projections, MLP and output head. Also includes norms, position embeddings, and writing the new
    tokens' KV."""


class PartClock:
    """Clock that adds up the seconds spent in each part of the steps of one thread.

    Time is added to the part that was entered last, with two exceptions. Everything that a residency policy does in its
    hooks before and after each layer (for example the projection of predicted queries) counts as work of the policy.
    Waiting for copies always counts as transfer. Entering and leaving a part takes about a microsecond.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Create a clock. `now` is a function that returns the time in seconds."""
        self._now = now
        self._spent = dict.fromkeys(Part, 0.0)
        self._running: Part | None = None
        self._since_s = 0.0

    @property
    def spent_s(self) -> Mapping[Part, float]:
        """Seconds spent in each part so far. A part that is still running is not included."""
        return dict(self._spent)

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Context manager. Add the time of the `with` block to `part`. If the block runs inside a block of
        `Part.POLICY` (work of the residency policy), the time is added to `Part.POLICY` instead, except the time of
        `Part.TRANSFER` (waiting for copies)."""
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
    """Times of the parts of one policy's steps, with one entry per round."""

    policy: str
    plain_ms: Sequence[float]
    """Milliseconds of a step whose parts are not measured, one value per round."""
    timed_ms: Sequence[float]
    """Milliseconds of a step whose parts are measured, one value per round."""
    parts_ms: Sequence[Mapping[Part, float]]
    """Milliseconds of each part of a measured step, one mapping per round."""

    @property
    def other_ms(self) -> list[float]:
        """Return the milliseconds of a step that are outside of all parts, one value per round."""
        return [step - sum(parts.values()) for step, parts in zip(self.timed_ms, self.parts_ms, strict=True)]

    @property
    def other_share(self) -> float:
        """Return the median fraction of a step's time that is outside of all parts."""
        return statistics.median(other / step for other, step in zip(self.other_ms, self.timed_ms, strict=True))

    @property
    def times_plain(self) -> float:
        """Return the median ratio of the duration of a step whose parts are measured to that of a step whose parts are
        not measured."""
        return statistics.median(timed / plain for timed, plain in zip(self.timed_ms, self.plain_ms, strict=True))

    def medians_ms(self) -> dict[str, float]:
        """Return the median milliseconds of each part by name. The key `other` is the time outside of all parts."""
        parts = {part.value: statistics.median(parts[part] for parts in self.parts_ms) for part in Part}
        return parts | {"other": statistics.median(self.other_ms)}


def breakdown_table(title: str, breakdowns: Sequence[Breakdown]) -> Table:
    """Return a table with one line per policy and one column per part, in milliseconds per step."""
    table = Table("policy", *Part, "other", "step", "untimed", title=title)
    for each in breakdowns:
        steps = (*each.medians_ms().values(), statistics.median(each.timed_ms), statistics.median(each.plain_ms))
        table.add_row(each.policy, *(f"{ms:.2f}" for ms in steps))
    return table
