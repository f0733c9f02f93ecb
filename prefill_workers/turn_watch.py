"""Finds out whether a rank's own engine still works, or hangs in a turn.

A process that stands still does not answer heartbeats. A thread that hangs (a kernel that waits for ever, a deadlock)
goes unnoticed otherwise: its process answers, and no rank waits for the last rank of a chain, or for one that is alone.
So `prefill_workers.engine` times its own turns with this watch, and its status says when a turn has stalled; the
supervisor then kills the process.

A prediction of how long a turn may take is for an idle machine, and a first turn may have none. What tells slow from
stuck is processor time: a thread that computes uses a core, however small its share on a crowded machine; a thread that
hangs uses none. So the limit counts time in which the thread uses nearly no processor time, and starts over when it
does:

    idle    the limit: max(floor, 4 x the expected turn). A prediction that is ten times too short costs nothing here.
    in all  30 times as long: an endless loop works too, and no turn is 30 times slower than four times expected.

Between two looks at most two periods count: a watch that was not scheduled itself cannot blame the engine.

On CUDA the host's thread spins while it waits for the device (the runtime's default), which counts as work.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

from baton.clock import Clock

EXPECTED_TURNS = 4
"""The limit in expected turns: an engine that takes longer is thought to have stopped."""
_LOOKS = 4
"""Number of looks within the shortest limit."""
_ENDLESS = 30
"""Number of limits that a turn may take in all, even if it works all the time."""
_WORK = 0.01
"""Least part of the time for which a computing thread gets a core."""


def limit_s(floor_s: float, turn_s: float) -> float:
    """Return the limit of seconds without a sign of life or work, where a turn is expected to take `turn_s`."""
    return max(floor_s, EXPECTED_TURNS * turn_s)


def cpu_clock(thread: threading.Thread) -> Callable[[], float]:
    """Return a function that reads the seconds of processor time that a thread has used. Call this function, and the
    one that it returns, only while the thread lives."""
    assert thread.ident is not None, "a thread that has not begun"
    return partial(time.clock_gettime, time.pthread_getcpuclockid(thread.ident))


class TurnWatch:
    """Times one engine's turns. Owned by the engine, whose lock guards it; pure, with both clocks passed in. `floor_s`
    is the shortest limit, in seconds. `cpu_s` reads the processor time that the engine's thread has used."""

    def __init__(self, clock: Clock, cpu_s: Callable[[], float], floor_s: float) -> None:
        self.stall = ""
        """Why the engine is thought to hang; empty while it works, or has no turn."""
        self.period_s = floor_s / _LOOKS
        """Seconds between two calls of `look`."""
        self._clock, self._cpu_s, self._floor_s = clock, cpu_s, floor_s
        self._name = ""
        """Name of the present turn; empty between turns."""
        self._has_begun = False
        self._limit_s = self._idle_s = self._total_s = 0.0
        self._looked_s = self._used_s = 0.0

    def begin(self, name: str, turn_s: float) -> None:
        """Note that a turn begins, which is expected to take `turn_s` seconds; 0 when unknown."""
        self._name, self._has_begun = name, True
        self._limit_s = limit_s(self._floor_s, turn_s)
        self._idle_s = self._total_s = 0.0
        self._looked_s, self._used_s = self._clock.now_s(), self._cpu_s()

    def end(self) -> None:
        """Note that the turn has ended, and clear `stall`."""
        self._name = self.stall = ""

    def look(self) -> bool:
        """Update `stall`, and return whether the engine has worked since the last look, as far as is known. To be
        called every `period_s` seconds."""
        has_begun, self._has_begun = self._has_begun, bool(self._name)
        if self._name:
            self._count()
        return has_begun and not self.stall

    def _count(self) -> None:
        now_s, used_s = self._clock.now_s(), self._cpu_s()
        passed_s = min(now_s - self._looked_s, 2 * self.period_s)
        has_worked = used_s - self._used_s > _WORK * passed_s
        self._idle_s = 0.0 if has_worked else self._idle_s + passed_s
        self._total_s += passed_s
        self._looked_s, self._used_s = now_s, used_s
        if self._idle_s > self._limit_s or self._total_s > _ENDLESS * self._limit_s:
            self.stall = (
                f"{self._name} has been in one turn for {self._total_s:.1f} s, the last {self._idle_s:.1f} s without "
                f"work; {self._limit_s:.1f} s are allowed"
            )
        else:
            self.stall = ""
