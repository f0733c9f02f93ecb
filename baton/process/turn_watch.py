"""Detects that an engine's thread hangs in a turn. A turn is one unit of the engine's work, for example one step of a
generation engine.

A process whose engine thread hangs still answers heartbeats, for example after a deadlock, or in a kernel that never
ends. Therefore `prefill_workers.engine` and `generate_workers.engine.core` time their own turns with this module, and
their status reports a stalled turn. The supervisor then kills the process.

The predicted duration of a turn is valid only for an idle machine, and a first turn may have no prediction. Slow and
hanging threads are therefore distinguished by processor time. A thread that computes uses some processor time even on a
crowded machine. A thread that hangs uses none. There are two limits:

    idle    maximum time in which the thread uses nearly no processor time: max(floor, 4 x the expected duration). The
            count restarts when the thread uses processor time. A prediction that is ten times too short does no harm.
    total   30 times the idle limit. It detects endless loops, which use processor time too. No real turn takes 30 x 4
            times its predicted duration.

A thread may also hang between two turns. An engine with waiting work then passes `has_work` to `look`, and the time
that the work waits is measured.

A thread with a running child process does not count as idle, because the first turn may compile kernels and wait for
the compiler.

Between two calls of `look`, at most 2 x `period_s` seconds are counted, even if more time has passed. Otherwise an
engine would be reported as hung if the thread that calls `look` was not scheduled for a long time.

On CUDA, the host thread spins while it waits for the device (the runtime's default). This counts as processor time.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from baton.process.clock import Clock

EXPECTED_TURNS = 4
"""Maximum time in which an engine's thread may use nearly no processor time during a turn (unit of the engine's work),
as a multiple of the turn's expected duration. After a longer time, the engine is considered hung."""
_LOOKS = 4
"""Number of checks (calls of `look`) within the shortest time after which an engine may be considered hung."""
_ENDLESS = 30
"""Maximum duration of a turn (unit of an engine's work), as a multiple of `limit_s`, the maximum time without processor
time. It also limits a turn that uses processor time throughout."""
_WORK = 0.01
"""Minimum fraction of the elapsed time that a thread must use as processor time to count as working."""
_LEAST_PERIOD = 0.1
"""Minimum time between two checks of the thread's processor time, as a fraction of `period_s`. In a shorter time, the
few microseconds that a waiting thread uses would count as work."""


def limit_s(floor_s: float, turn_s: float) -> float:
    """Return the maximum time in seconds for which an engine's thread may use nearly no processor time during a turn
    (unit of the engine's work). `turn_s` is the expected duration of the turn. The result is at least `floor_s`."""
    return max(floor_s, EXPECTED_TURNS * turn_s)


def cpu_s(thread: threading.Thread) -> float:
    """Return the processor time in seconds that a thread has used. 0 if the thread is not running."""
    if thread.native_id is None or not thread.is_alive():
        return 0.0
    try:  # the id that pthread_getcpuclockid returns; that must not be called for a thread that has ended
        return time.clock_gettime(~thread.native_id << 3 | 6)
    except OSError:
        return 0.0


def has_child(thread: threading.Thread) -> bool:
    """Return True if the thread has started a process that still exists. Return False if the operating system does not
    list the child processes of a thread."""
    try:
        return bool(Path(f"/proc/self/task/{thread.native_id}/children").read_bytes())
    except OSError:
        return False


class TurnWatch:
    """Detects that an engine's thread hangs. It measures the duration of each turn (unit of the engine's work, for
    example one step). The engine's thread calls `begin` and `end`, which take no lock and read no clock. Any thread may
    call `look`, which checks the current turn.

    `floor_s` is the shortest time in seconds after which the thread may be considered hung. `cpu_s` returns the
    processor time in seconds that the thread has used. `has_child` returns True if the thread has started a process
    that still exists.
    """

    def __init__(
        self, clock: Clock, cpu_s: Callable[[], float], floor_s: float, has_child: Callable[[], bool] = lambda: False
    ) -> None:
        self.stall = ""
        """Reason why the engine is considered hung. Empty while the engine works or has nothing to do."""
        self.period_s = floor_s / _LOOKS
        """Maximum time in seconds between two checks for a hung thread (calls of `look`)."""
        self._clock, self._cpu_s, self._has_child, self._floor_s = clock, cpu_s, has_child, floor_s
        self._begun = self._ended = ("", 0.0)
        """Last turn (unit of the engine's work) that began, and last turn that ended. Each is (name, expected
        seconds)."""
        self._looking = threading.Lock()
        self._seen, self._was_busy = self._begun, False
        """State at the last call of `look`. The first value is the turn (unit of the engine's work) that had begun
        last. The second is True if that turn was running or work was waiting."""
        self._idle_s = self._total_s = self._looked_s = self._used_s = 0.0

    @classmethod
    def over(cls, thread: threading.Thread, clock: Clock, floor_s: float) -> Self:
        """Return a watch for the engine whose work runs on `thread`. The thread may be started later."""
        return cls(clock, partial(cpu_s, thread), floor_s, partial(has_child, thread))

    def begin(self, name: str, turn_s: float) -> None:
        """Record that a turn (unit of the engine's work) begins. `name` describes the turn, and `turn_s` is its
        expected duration in seconds (0: unknown)."""
        self._begun = name, turn_s

    def end(self) -> None:
        """Record that the current turn (unit of the engine's work) has ended. Clear `stall`, the reason why the engine
        was considered hung."""
        self._ended = self._begun
        self.stall = ""

    def look(self, has_work: bool = False) -> bool:
        """Check whether the engine's thread hangs, and set `stall` to the reason, or to an empty string. Return True if
        the engine is not considered hung, and a turn was running or work was waiting at some time since the last call.

        `has_work` is True if work waits for the engine's next turn (unit of work). The duration of a turn is measured
        from the first call of `look` during the turn. The time that work waits between two turns is measured in the
        same way. Call this method at least every `period_s` seconds.
        """
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
        """Add the time since the last call of `look` to the measured times. Return the reason why the engine is
        considered hung, or an empty string. `what` describes the current work, and `turn_s` is its expected duration in
        seconds. If `is_new` is set, this work has just begun, and the measured times restart at 0."""
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
