"""Cluster that a chaos run tests. It consists of supervised worker groups and an orchestrator in a child process. A
proxy that injects network faults is in front of each worker and of the orchestrator. Runs on the owner's event loop.
Closing the cluster ends all its processes and connections."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from baton.errors import UnavailableError
from baton.process.backoff import Backoff
from baton.process.clock import Clock
from baton.v1 import generate_pb2, prefill_pb2
from baton_lab.chaos.faults import SeededPlan
from baton_lab.chaos.network import HOST, FaultyNetwork, NetworkedSpawner, NetworkedWorker
from baton_lab.chaos.schedule import ORCHESTRATOR, Act, Blow
from deploy.config.worker import WorkerConfig
from deploy.groups.chain_links import ChainLinks
from deploy.groups.cluster import Cluster
from deploy.groups.group import WorkerGroup
from deploy.groups.keeper import OrchestratorKeeper, OrchestratorPlan
from deploy.groups.processes import ProcessSpawner
from deploy.groups.spawner import Spawner
from deploy.groups.surroundings import Heartbeat, Surroundings
from deploy.groups.worker import Worker
from orchestrator.membership.view import ClusterView

_STATUS_S = 2.0
_START_S = 60.0
_BACKOFF = Backoff(0.2, 0.5)
"""Delays in seconds before a worker is restarted. They are short, because in a chaos run workers end mostly from
injected faults."""


@dataclass(frozen=True)
class ChaosPlan:
    """Components and settings of the chaos cluster."""

    spawner: Spawner
    """Spawner that starts the workers. The chaos cluster adds the faulty networks itself."""
    chain: Sequence[WorkerConfig]
    """Configurations of the ranks of the cluster's single prefill group."""
    engines: Sequence[WorkerConfig]
    """Configurations of the generation engines. Each engine is a generation group of its own."""
    orchestrator: Callable[[str], OrchestratorPlan]
    """Function that creates the orchestrator's plan. Its argument is the fingerprint of the workers' KvLayout."""
    faults: SeededPlan
    """Plan that selects the faults of calls, both between workers and from clients."""
    heartbeat: Heartbeat
    num_slots: int
    """Number of slots of each engine."""
    max_tokens: int
    """Maximum number of tokens of a request, prompt and output together."""


class ChaosCluster:
    """Running chaos cluster. It is an async context manager that can be entered once. Clients can connect after it is
    entered."""

    def __init__(self, plan: ChaosPlan, clock: Clock, report: Callable[[str], None]) -> None:
        """Create a cluster from a plan. `report` is called with one line of text for each event, to show to the
        user."""
        self.faults = plan.faults
        self.heartbeat = plan.heartbeat
        self._plan = plan
        self._spawner = NetworkedSpawner(plan.spawner, plan.faults)
        self._around = Surroundings(
            self._spawner, plan.heartbeat, clock, report, changed=self._changed, backoff=_BACKOFF
        )
        chain = WorkerGroup("prefill-0", plan.chain, self._around, ChainLinks(HOST, plan.heartbeat.dead_after_s))
        engines = [WorkerGroup(config.name, [config], self._around) for config in plan.engines]
        self._cluster = Cluster([chain], engines, self._around)
        self._keeper: OrchestratorKeeper | None = None
        self._front = FaultyNetwork(plan.faults)

    @property
    def endpoint(self) -> str:
        """Return the address (`host:port`) that clients connect to."""
        return self._front.endpoint

    @property
    def victims(self) -> tuple[str, ...]:
        """Return the names of the processes that can be killed or stopped."""
        return (*(config.name for config in (*self._plan.chain, *self._plan.engines)), ORCHESTRATOR)

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the generation engines."""
        return tuple(config.name for config in self._plan.engines)

    def worker(self, name: str) -> NetworkedWorker:
        """Return the worker `name`. After a restart, this is the new process."""
        return self._spawner.workers[name]

    async def __aenter__(self) -> "ChaosCluster":
        try:
            await self._cluster.start()
            keeper = await self._keep_orchestrator()
            await self._front.open(f"{HOST}:{keeper.ports[0]}")
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    def strike(self, blow: Blow) -> bool:
        """Kill or stop the process `blow.victim`. Return True if the process was running. If it has already ended, do
        nothing and return False."""
        if blow.victim == ORCHESTRATOR:
            return self._strike_orchestrator(signal.SIGKILL if blow.act is Act.KILL else signal.SIGSTOP)
        worker = self.worker(blow.victim)
        if worker.ended:
            return False
        if blow.act is Act.KILL:
            worker.kill()
        else:
            worker.stop()
        return True

    async def until_ready(self, timeout_s: float) -> None:
        """Wait until all workers serve and the prefill ranks are connected to each other. Raises UnavailableError if
        this takes more than `timeout_s` seconds."""
        await self._cluster.until_ready(timeout_s)

    async def engine_status(self, name: str, timeout_s: float) -> generate_pb2.GenerationStatus | None:
        """Query the status of the engine `name` directly, without its faulty network. Return None if the engine does
        not answer within `timeout_s` seconds."""
        worker = Worker(self.worker(name).inner)
        try:
            status = await worker.status(timeout_s)
        except grpc.aio.AioRpcError:
            return None
        finally:
            await worker.disconnect()
        assert isinstance(status, generate_pb2.GenerationStatus)
        return status

    async def num_jobs(self) -> int:
        """Return the number of jobs in flight on all prefill ranks together. Raises UnavailableError if a rank does not
        answer."""
        workers = [worker for group in self._cluster.prefill for worker in group.workers.values()]
        try:
            statuses = await asyncio.gather(*(worker.status(_STATUS_S) for worker in workers))
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"a prefill rank does not answer ({error.code()})") from error
        return sum(status.num_jobs for status in statuses if isinstance(status, prefill_pb2.PrefillStatus))

    async def _keep_orchestrator(self) -> OrchestratorKeeper:
        """Start the orchestrator in a child process, even if the workers are servers in this process."""
        plan = self._plan.orchestrator(self._cluster.generation[0].layout_fingerprint)
        around = replace(self._around, spawner=ProcessSpawner(_START_S))
        self._keeper = OrchestratorKeeper(plan, self._view, around)
        await self._keeper.start()
        return self._keeper

    def _strike_orchestrator(self, number: signal.Signals) -> bool:
        if self._keeper is None or not self._keeper.pid:
            return False
        os.kill(self._keeper.pid, number)
        self._changed()
        return True

    def _changed(self) -> None:
        if self._keeper is not None:
            self._keeper.tell()

    def _view(self) -> ClusterView:
        return self._cluster.view(self._plan.num_slots, self._plan.max_tokens)

    async def _close(self) -> None:
        await self._front.close()
        if self._keeper is not None:
            await self._keeper.close()
        await self._cluster.close()
