"""Limits a child process to a fraction of a core by signals. The process is stopped while it has used more CPU time
than this fraction allows, and resumed afterwards.

A CPU quota of the kernel (cgroup `cpu.max`) would have the same effect, but usually requires privileges.
"""

import asyncio
import contextlib
import os
import signal
import time

from baton.process.clock import Clock
from deploy.groups.spawner import WorkerHandle

_TICK_S = 0.005
"""Seconds between two checks of the CPU time that the process has used."""
_PERIOD_S = 0.1
"""Limit in seconds on unused CPU time. If the process uses less CPU time than its share, it can use the difference
later. The difference never exceeds the CPU time that the share grants in this many seconds."""
_MOST_S = 0.5
"""Maximum time in seconds for which the process is stopped without interruption, even if a check was late."""


async def slow_down(worker: WorkerHandle, share: float, for_s: float, clock: Clock) -> float:
    """Limit a worker's process to the fraction `share` of a core, for `for_s` seconds or until the process has ended.
    The worker must be a child process. Return the fraction of a core that the process used."""
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
