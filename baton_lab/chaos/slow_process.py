"""Limits a child process to a share of a core, by signals: it is stopped while it is above its share, then resumed.

A quota of the kernel (cgroup cpu.max) does the same, but few users may set one.
"""

import asyncio
import contextlib
import os
import signal
import time

from baton.process.clock import Clock
from deploy.groups.spawner import WorkerHandle

_TICK_S = 0.005
"""Seconds between two looks at what the process has used."""
_PERIOD_S = 0.1
"""Seconds whose share a process may use at once when it has rested."""
_MOST_S = 0.5
"""Longest time in seconds for which the process is stopped at once, also after looks that came late."""


async def slow_down(worker: WorkerHandle, share: float, for_s: float, clock: Clock) -> float:
    """Limit a worker that is a child process to this share of a core, for `for_s` seconds or until it has ended. Return
    the share that it used."""
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
