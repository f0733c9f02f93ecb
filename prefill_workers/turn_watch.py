"""Whether this rank's own engine still works, or hangs in a turn.

A process that stands still leaves heartbeats unanswered. A thread that does (a kernel that waits for ever, a lock that
nobody opens) is noticed by none: the process answers, and who is last in a chain, or alone, is waited for by no rank.
So the rank times its own turns, and its status says when one has stalled; the supervisor then kills it.

How long may a turn take? A prediction is of an idle machine, and a first turn may have none. What tells slow from
stuck is work: a thread that computes uses a core, however few of a crowded machine's it gets; one that hangs uses none.
So patience runs while the thread uses no processor time worth the name, and begins again when it does:

    idle    the limit: max(floor, 4 x the expected turn). A prediction that is ten times too short costs nothing here.
    in all  30 times as long: an endless loop works too, and nothing is 30 times slower than four times expected.

Time in which nobody looked does not count: a watch that was not scheduled itself cannot blame the engine.

On CUDA the host's thread spins while it waits for the device (the runtime's default), which counts as work.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

from baton.clock import Clock

EXPECTED_TURNS = 4
"""Expected turns that an engine may take before it is thought to have stopped."""
_LOOKS = 4
"""Looks in the shortest limit."""
_ENDLESS = 30
"""Limits that a turn may take which works all the time."""
_WORK = 0.01
"""Part of the time that a thread which computes gets of some core, at least."""


def limit_s(floor_s: float, turn_s: float) -> float:
    """Seconds without a sign of life or work that are too many where a turn is expected to take `turn_s`."""
    return max(floor_s, EXPECTED_TURNS * turn_s)


def cpu_clock(thread: threading.Thread) -> Callable[[], float]:
    """Reads the seconds of processor time that a thread has used. Call it, and what it returns, while the thread
    lives."""
    assert thread.ident is not None, "a thread that has not begun"
    return partial(time.clock_gettime, time.pthread_getcpuclockid(thread.ident))


class TurnWatch:
    """Times one engine's turns. Owned by the engine, which guards it; pure, with both clocks passed in.

    `floor_s`: the shortest limit, in seconds. `cpu_s`: processor time that the engine's thread has used.
    """

    def __init__(self, clock: Clock, cpu_s: Callable[[], float], floor_s: float) -> None:
        self.stall = ""
        """Why the engine is thought to hang; empty while it works, or has nothing to do."""
        self.period_s = floor_s / _LOOKS
        """Seconds between two looks."""
        self._clock, self._cpu_s, self._floor_s = clock, cpu_s, floor_s
        self._name = ""
        """Of the present turn; empty between turns."""
        self._has_begun = False
        self._limit_s = self._idle_s = self._total_s = 0.0
        self._looked_s = self._used_s = 0.0

    def begin(self, name: str, turn_s: float) -> None:
        """A turn begins that is expected to take `turn_s` seconds; 0 when nobody knows."""
        self._name, self._has_begun = name, True
        self._limit_s = limit_s(self._floor_s, turn_s)
        self._idle_s = self._total_s = 0.0
        self._looked_s, self._used_s = self._clock.now_s(), self._cpu_s()

    def end(self) -> None:
        """The turn is over."""
        self._name = self.stall = ""

    def look(self) -> bool:
        """Whether the engine has worked since the last look, as far as anyone can tell. To be called every
        `period_s`; sets `stall`."""
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
