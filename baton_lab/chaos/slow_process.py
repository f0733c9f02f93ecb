"""Limits a child process to a fraction of a core by signals: stops it while it is above its share, then resumes it.

A quota of the kernel (cgroup cpu.max) would do the same, but few users may set one.
"""

import asyncio
import contextlib
import os
import signal
import time

from baton.process.clock import Clock
from deploy.groups.spawner import WorkerHandle

_TICK_S = 0.005
"""Seconds between two checks of the processor time that the process has used."""
_PERIOD_S = 0.1
"""Maximum unused share that the process may save and then use at once, in seconds of the limit."""
_MOST_S = 0.5
"""Maximum seconds for which the process is stopped at once, even after late checks."""


async def slow_down(worker: WorkerHandle, share: float, for_s: float, clock: Clock) -> float:
    """Limit a worker that is a child process to the fraction `share` of a core, for `for_s` seconds or until it has
    ended. Return the fraction that it used."""
    clock_id = ~worker.pid << 3 | 2  # as clock_getcpuclockid makes it
    began_s = looked_s = clock.now_s()
    used_s = credit_s = 0.0
    with contextlib.suppress(OSError):  # the process has ended
        first_s = time.clock_gettime(clock_id)
        try:
            while not worker.ended and looked_s - began_s < for_s:
                now_s, now_used_s = clock.now_s(), time.clock_gettime(clock_id) - first_s
                earned_s = min(credit_s + share * (now_s - looked_s), share * _PERIOD_S)
                credit_s = max(earned_s - (now_used_s - used_s), -share * _MOST_S)
                looked_s, used_s = now_s, now_used_s
                os.kill(worker.pid, signal.SIGCONT if credit_s > 0 else signal.SIGSTOP)
                await asyncio.sleep(_TICK_S)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
    return used_s / max(looked_s - began_s, _TICK_S)
