"""Two faults of a generation engine that its supervisor must distinguish: an engine whose thread hangs, and an engine
whose process is slow.

An engine that hangs must be killed within the hang limit and replaced. An engine limited to a fifth of a core must not
be killed, and must continue to run steps. Both faults are injected from outside the worker's process (`held_thread`,
`slow_process`). Runs on the cluster's event loop.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from baton.process.clock import Clock
from baton.process.turn_watch import limit_s
from baton_lab.chaos.cluster import ChaosCluster
from baton_lab.chaos.held_thread import HeldThread, thread_of
from baton_lab.chaos.network import NetworkedWorker
from baton_lab.chaos.slow_process import slow_down
from generate_workers.config import EngineConfig

THREAD = "generate-engine"
"""Name of the engine's thread as the operating system shows it."""
SHARE = 0.2
"""Fraction of a core that a slow engine gets."""
SLOW_S = 30.0
"""Duration of the slowdown in seconds. It is three times the limit after which an engine that hangs is killed."""
_ANSWER_S = 0.5
"""Timeout in seconds for a status query to an engine whose thread is stopped. Also the time for which the thread is
resumed before the next attempt, if the engine did not answer or had no sequences."""


@dataclass(frozen=True)
class Trial:
    """Outcome of one fault of an engine."""

    happened: bool
    note: str
    """Text for people that describes the fault and the reaction of the cluster."""
    holds: bool = True
    """True if the cluster reacted as required."""


class EngineTrials:
    """Injects faults into the engines of a cluster and checks how the cluster reacts. Each engine has at most one fault
    at a time."""

    def __init__(self, cluster: ChaosCluster, clock: Clock, *, late_s: float, start_s: float) -> None:
        """Prepare trials on a cluster. `late_s`: extra seconds that are allowed because the machine is busy. `start_s`:
        maximum seconds until a started worker serves."""
        self._cluster, self._clock = cluster, clock
        self._late_s, self._start_s = late_s, start_s

    async def hang(self, name: str) -> Trial:
        """Stop the engine's thread in the worker `name` at a time when the engine has sequences. Wait until the
        supervisor has killed the worker, and then until a new worker serves in its place. Return the outcome."""
        try:
            async with asyncio.timeout(self._start_s):
                worker, held, step_s = await self._hold(name)
        except TimeoutError:
            return Trial(False, f"SKIPPED: {name} was not hung: it had no sequences for {self._start_s:g} s")
        except OSError as error:
            return Trial(False, f"SKIPPED: {name} was not hung, its thread cannot be held: {error}")
        began_s, bound_s = self._clock.now_s(), self._bound_s(worker, step_s)
        try:
            async with asyncio.timeout(bound_s):
                await worker.wait()
        except TimeoutError:
            return Trial(True, f"{name} hung for {bound_s:.1f} s and was not killed", False)
        finally:
            held.release()
        killed_s = self._clock.now_s() - began_s
        try:
            async with asyncio.timeout(self._start_s):
                await worker.replaced.wait()
        except TimeoutError:
            return Trial(True, f"{name} hung, and did not serve again within {self._start_s:g} s", False)
        again_s = self._clock.now_s() - began_s - killed_s
        return Trial(True, f"{name} hung: killed after {killed_s:.1f} s, served again {again_s:.1f} s later")

    async def slow(self, name: str) -> Trial:
        """Limit the process of the engine `name` to the fraction SHARE of a core for SLOW_S seconds. Return the
        outcome. The cluster reacted as required if the same process still answers and has run at least one step in this
        time."""
        worker = self._cluster.worker(name)
        before = await self._cluster.engine_status(name, self._start_s)
        share = await slow_down(worker, SHARE, SLOW_S, self._clock)
        after = await self._cluster.engine_status(name, self._start_s)
        note = f"{name} had {share:.2f} of a core for {SLOW_S:g} s"
        if worker.ended or self._cluster.worker(name) is not worker or before is None or after is None:
            return Trial(True, f"{note}: process {worker.pid} was ended, or does not answer", False)
        num_steps = after.num_steps - before.num_steps
        return Trial(True, f"{note}: {num_steps} steps, still process {worker.pid}", num_steps > 0)

    async def _hold(self, name: str) -> tuple[NetworkedWorker, HeldThread, float]:
        """Stop the engine's thread at a time when the engine has sequences and its process still answers. A process
        does not answer if the stopped thread holds Python's global lock. Return the worker, the stopped thread, and the
        duration of the engine's latest step in seconds. Raises OSError if the thread cannot be stopped."""
        while True:
            worker = self._cluster.worker(name)
            with contextlib.suppress(ProcessLookupError):  # the worker has ended: try its replacement
                held = HeldThread(thread_of(worker.pid, THREAD))
                try:
                    await held.until_held()
                    status = await self._cluster.engine_status(name, _ANSWER_S)
                except BaseException:
                    held.release()
                    raise
                if status is not None and status.num_active and not worker.ended:
                    return worker, held, status.last_step.duration_s
                held.release()
            await asyncio.sleep(_ANSWER_S)

    def _bound_s(self, worker: NetworkedWorker, step_s: float) -> float:
        """Return the seconds within which a hung engine must be killed: its watchdog's limit, two heartbeats and
        `late_s`."""
        section = worker.config.section
        assert isinstance(section, EngineConfig)
        heartbeats_s = 2 * self._cluster.heartbeat.interval_s
        return limit_s(section.watchdog_floor_s, step_s) + heartbeats_s + self._late_s
