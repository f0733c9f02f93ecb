"""Share of the processors' time that other programs took during a measurement. If it is large, numbers mean little."""

import os
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of a line of /proc/stat in which a processor did something: user, nice, system, interrupts, and stolen."""


class Crowding:
    """Counts from its creation. Linux only: elsewhere no time counts as taken by others."""

    def __init__(self) -> None:
        self._before = _read()

    def share(self) -> float:
        """Return the fraction of all processors' time that other processes took. Children of this process count as its
        own once they have ended."""
        busy_s, own_s, all_s = (after - before for after, before in zip(_read(), self._before, strict=True))
        return max(busy_s - own_s, 0.0) / all_s if all_s else 0.0


def _read() -> tuple[float, float, float]:
    """Return the seconds in which processors were busy, those of this process and its children, and all seconds."""
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    if not _STAT.exists():
        return own_s, own_s, times.elapsed * (os.cpu_count() or 1)
    columns = [int(each) / os.sysconf("SC_CLK_TCK") for each in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(columns[index] for index in _BUSY), own_s, sum(columns)
