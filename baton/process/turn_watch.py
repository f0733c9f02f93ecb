"""Detects an engine's thread that hangs in a turn. A turn is one unit of the engine's work: a prefill rank's turn, or a
generation engine's step.

A stopped process does not answer heartbeats. But a process still answers them if only its engine thread hangs, for
example in a deadlock or in a kernel that never ends. So `prefill_workers.engine` and `generate_workers.engine.core`
time their own turns with this watch, and their status reports a stalled turn. The supervisor then kills the process.

The predicted duration of a turn is valid only for an idle machine, and a first turn may have no prediction. Processor
time distinguishes a slow thread from a hanging one: a computing thread uses some processor time even on a crowded
machine, and a hanging thread uses none. So the limit applies to the time in which the thread uses nearly no processor
time. Counting starts over when the thread uses some. There are two limits:

    idle    the limit: max(floor, 4 x the expected turn). A prediction that is ten times too short does no harm.
    in all  30 limits, because an endless loop uses processor time too. No turn takes 30 x 4 times its prediction.

A thread may also hang between two turns. An engine that has waiting work then passes `has_work` to `look`, and the
watch measures how long that work waits.

A thread that has a running child process does not count as idle: a first turn may compile kernels and wait for the
compiler.

At most two periods are counted between two calls of `look`. Otherwise a watch whose own thread was not scheduled would
report the engine.

On CUDA the host's thread spins while it waits for the device (the runtime's default), which counts as work.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from baton.process.clock import Clock

EXPECTED_TURNS = 4
"""Limit as a multiple of the expected duration of a turn. An engine that takes longer is considered hung."""
_LOOKS = 4
"""Number of calls of `look` within the shortest limit."""
_ENDLESS = 30
"""Maximum total duration of a turn as a multiple of the limit, even if the turn uses processor time."""
_WORK = 0.01
"""Minimum fraction of the time for which a computing thread gets a core."""
_LEAST_PERIOD = 0.1
"""Minimum fraction of a period between two calls of `look`. In a shorter time, microseconds of a waiting thread would
count as work."""


def limit_s(floor_s: float, turn_s: float) -> float:
    """Return the limit in seconds without processor time for a turn that is expected to take `turn_s`. `floor_s` is the
    shortest limit."""
    return max(floor_s, EXPECTED_TURNS * turn_s)


def cpu_s(thread: threading.Thread) -> float:
    """Return the seconds of processor time that a thread has used; 0 if the thread is not running."""
    if thread.native_id is None or not thread.is_alive():
        return 0.0
    try:  # the id that pthread_getcpuclockid returns; that must not be called for a thread that has ended
        return time.clock_gettime(~thread.native_id << 3 | 6)
    except OSError:
        return 0.0


def has_child(thread: threading.Thread) -> bool:
    """Return whether the thread has started a process that still exists; False if the system cannot list the processes
    of a thread."""
    try:
        return bool(Path(f"/proc/self/task/{thread.native_id}/children").read_bytes())
    except OSError:
        return False


class TurnWatch:
    """Measures one engine's turns. The engine's thread calls `begin` and `end`, which take no lock and read no clock.
    Any thread may call `look`. Does no I/O of its own: all clocks are arguments. `floor_s` is the shortest limit, in
    seconds. `cpu_s` reads the processor time that the engine's thread has used. `has_child` returns whether the thread
    has started a process that still exists."""

    def __init__(
        self, clock: Clock, cpu_s: Callable[[], float], floor_s: float, has_child: Callable[[], bool] = lambda: False
    ) -> None:
        self.stall = ""
        """Reason why the engine is considered hung; empty while it works or has nothing to do."""
        self.period_s = floor_s / _LOOKS
        """Seconds between two calls of `look`."""
        self._clock, self._cpu_s, self._has_child, self._floor_s = clock, cpu_s, has_child, floor_s
        self._begun = self._ended = ("", 0.0)
        """Latest turn that has begun, and latest turn that has ended, each with its name and expected seconds."""
        self._looking = threading.Lock()
        self._seen, self._was_busy = self._begun, False
        """Latest turn at the last call of `look`, and whether that turn was running or work was waiting for the next
        turn."""
        self._idle_s = self._total_s = self._looked_s = self._used_s = 0.0

    @classmethod
    def over(cls, thread: threading.Thread, clock: Clock, floor_s: float) -> Self:
        """Return a watch for the turns of `thread`, which may be started later."""
        return cls(clock, partial(cpu_s, thread), floor_s, partial(has_child, thread))

    def begin(self, name: str, turn_s: float) -> None:
        """Record that a turn begins. `turn_s` is its expected duration in seconds, or 0 if unknown."""
        self._begun = name, turn_s

    def end(self) -> None:
        """Record that the turn has ended, and clear `stall`."""
        self._ended = self._begun
        self.stall = ""

    def look(self, has_work: bool = False) -> bool:
        """Update `stall`, and return whether the engine is known to have worked since the last call. A turn is timed
        from the first call that sees it. Work that waits while no turn runs (`has_work`) is timed in the same way. Call
        this method every `period_s` seconds, or more often."""
        with self._looking:
            turn, was_busy = self._begun, self._was_busy
            in_turn = turn is not self._ended
            is_busy = in_turn or has_work
            is_new = turn is not self._seen or (is_busy and not was_busy)
            self._seen, self._was_busy = turn, is_busy
            name, turn_s = turn
            what = f"{name} has been in one turn" if in_turn else f"work has waited after {name or 'the start'}"
            self.stall = self._count(what, turn_s if in_turn else 0.0, is_new=is_new) if is_busy else ""
            return (is_new or was_busy) and not self.stall

    def _count(self, what: str, turn_s: float, *, is_new: bool) -> str:
        """Count the time since the last call of `look`, and return why the engine has stalled, or an empty string.
        `what` names the work that has taken that time, `turn_s` its expected seconds."""
        now_s, used_s = self._clock.now_s(), self._cpu_s()
        if not is_new and now_s - self._looked_s < _LEAST_PERIOD * self.period_s:
            return self.stall
        passed_s = min(now_s - self._looked_s, 2 * self.period_s)
        has_worked = used_s - self._used_s > _WORK * passed_s or self._has_child()
        self._looked_s, self._used_s = now_s, used_s
        if is_new:
            self._idle_s = self._total_s = 0.0
            return ""
        most_s = limit_s(self._floor_s, turn_s)
        self._idle_s = 0.0 if has_worked else self._idle_s + passed_s
        self._total_s += passed_s
        if self._idle_s <= most_s and self._total_s <= _ENDLESS * most_s:
            return ""
        return (
            f"{what} for {self._total_s:.1f} s, the last {self._idle_s:.1f} s without work; {most_s:.1f} s are allowed"
        )
