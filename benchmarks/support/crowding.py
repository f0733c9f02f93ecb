"""Measures the fraction of the processors' time that other programs used during a benchmark. If the fraction is large,
the benchmark's results are unreliable."""

import os
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of a line of /proc/stat that count as busy, without the name in front: user, nice, system, hardware
interrupts, software interrupts, and stolen time."""


class Crowding:
    """Measures the fraction of processor time that other programs have used since this object was created. Linux only;
    on other systems the fraction is 0."""

    def __init__(self) -> None:
        self._before = _read()

    def share(self) -> float:
        """Return the fraction of the time of all processors that other processes used. A running child process of this
        process counts as another process. After it has ended, it counts as part of this process."""
        busy_s, own_s, all_s = (after - before for after, before in zip(_read(), self._before, strict=True))
        return max(busy_s - own_s, 0.0) / all_s if all_s else 0.0


def _read() -> tuple[float, float, float]:
    """Return the seconds that all processors were busy, the seconds used by this process and its ended children, and
    the total seconds of all processors."""
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    if not _STAT.exists():
        return own_s, own_s, times.elapsed * (os.cpu_count() or 1)
    columns = [int(each) / os.sysconf("SC_CLK_TCK") for each in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(columns[index] for index in _BUSY), own_s, sum(columns)
