"""Clusters for tests: workers of a tiny model of letters in this process, an orchestrator, and its client.

`cluster` has no supervisor: the test itself stops and replaces workers, and stops their computation by gates. The
other kinds of clusters have the same client (`clients.ClusterClient`):

- `supervision.supervised`: a supervisor replaces workers, and starts and ends groups as ordered. Optionally, there are
  planned faults, or workers are child processes.
- `kept.kept`: workers and orchestrator are child processes, configured as for `baton serve`.
- `tests.support.paced.cluster.paced_cluster`: like `kept.kept`, with engines that take the time of simulated hardware.

chaos.py runs clusters of `baton chaos`, and relays.py runs clusters of `baton local`.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.modeling.forward.decoder import Decoder
from baton.modeling.prefix_store.node import DiskPlace
from baton.planning.planner import ChainPlanner
from baton.transport.channel import make_channel
from baton.transport.kv_sink import ReserveSpec
from baton.types import LeaseRef, RequestId
from baton.v1 import orchestrator_pb2 as pb
from deploy.config.worker import WorkerConfig
from deploy.groups.chain_links import ChainLinks
from deploy.groups.worker import Worker
from generate_workers.config import EngineConfig
from generate_workers.servicer import GenerationServer
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.requests.config import OrchestratorConfig
from prefill_workers.servicer import PrefillServer
from tests.support.clusters.clients import HOST, Answer, ClusterClient, StreamCall, start_orchestrator
from tests.support.clusters.workers import InProcessSpawner, InProcessWorker, tiny_worker
from tests.support.engines.gated_kernels import Gate
from tests.support.engines.prefixes import PLENTY
from tests.support.eventually import eventually
from tests.support.wire.secret import SECRET

MAX_TOKENS = 400
HASTY = OrchestratorConfig(avoid_s=0.2, prefill_wait_s=0.3, generation_wait_s=0.5)
"""Configuration with short waits."""


class BareCluster(ClusterClient):
    """Servers without a supervisor, and their orchestrator. A gate in front of each server's attention kernels can stop
    its computation. All ranks form one prefill group, `chain`; generation groups are named `group-0`, `group-1`, and so
    on."""

    def __init__(self, spawner: InProcessSpawner, engine: EngineConfig, planner: ChainPlanner | None) -> None:
        """Create a cluster that has no workers yet. `engine` configures each generation group."""
        self.members = Membership()
        self.ranks: list[PrefillServer] = []
        self.rank_gates: list[Gate] = []
        self.groups: list[GenerationServer] = []
        self.group_gates: list[Gate] = []
        self.fronts: dict[int, str] = {}
        """Addresses (host:port) that the orchestrator uses in place of a worker's own address, by the worker's port."""
        self._spawner = spawner
        self._engine = engine
        self.num_slots = engine.num_slots
        self._planner = planner
        self._links = ChainLinks(HOST, 20.0)

    @property
    def decoder(self) -> Decoder:
        """Return the model that all workers serve, without a gate in front of its kernels."""
        return self._spawner.decoder

    async def add_rank(self) -> None:
        handle, gate = await self._start(tiny_worker("prefill", len(self.ranks)))
        assert isinstance(handle.server, PrefillServer)
        self.ranks.append(handle.server)
        self.rank_gates.append(gate)

    async def add_group(self) -> None:
        handle, gate = await self._start(tiny_worker("generate", group=len(self.groups), section=self._engine))
        assert isinstance(handle.server, GenerationServer)
        self.groups.append(handle.server)
        self.group_gates.append(gate)

    async def _start(self, config: WorkerConfig) -> tuple[InProcessWorker, Gate]:
        assert self._spawner.gates is not None
        return await self._spawner.start(config), self._spawner.gates[config.name]

    async def start_epoch(self) -> None:
        """Start a new epoch of the prefill group: connect its ranks by new links."""
        handles = {handle.server.port: handle for handle in self._spawner.made}
        workers = [Worker(handles[rank.port]) for rank in self.ranks]
        try:
            await self._links.renew(workers)
        finally:
            await asyncio.gather(*(worker.disconnect() for worker in workers))

    def view(self, *, prefill_ready: bool = True) -> ClusterView:
        """Return the view of the cluster that a supervisor would send to the orchestrator at this moment."""
        endpoints = tuple(self._endpoint(rank.port) for rank in self.ranks)
        layout = self.decoder.layout.fingerprint
        prefixes = self.ranks[0].prefixes if self.ranks else None
        store = prefixes.identity if prefixes is not None else ""
        return ClusterView(
            prefill=(PrefillGroup("chain", endpoints, self._links.epoch, prefill_ready, store),) if endpoints else (),
            generation=tuple(
                GenerationGroup(
                    f"group-{index}",
                    self._endpoint(server.port),
                    layout,
                    self.num_slots,
                    MAX_TOKENS,
                    prefix_store=server.prefixes.identity if server.prefixes is not None else "",
                )
                for index, server in enumerate(self.groups)
            ),
        )

    def _endpoint(self, port: int) -> str:
        return self.fronts.get(port, f"{HOST}:{port}")

    async def held_up(self, request: pb.GenerateRequest) -> tuple[StreamCall, Answer, str]:
        """Start a request and stop it at a gate after its first tokens. Return the stream, the answer so far, and the
        name of its generation group. The gates of the other groups are open."""
        for gate in self.group_gates:
            gate.shut(num_passes=4 * self.decoder.config.num_layers)
        call, answer = self.open(request), Answer()
        await answer.read(call, 3)
        names = [f"group-{number}" for number in range(len(self.groups))]
        (busy,) = (number for number, name in enumerate(names) if self.members.load(name).num_requests)
        for gate in (*self.group_gates[:busy], *self.group_gates[busy + 1 :]):
            gate.open()
        return call, answer, names[busy]

    def lease_to_stranger(self, group: int = 0) -> LeaseRef:
        """Lease a slot directly, without a request of the orchestrator."""
        return self.groups[group].slots.reserve(ReserveSpec(RequestId("stranger"), 1, 10, 20, ttl_s=600.0)).ref

    async def health(self) -> int:
        """Return the status that the orchestrator's health service reports."""
        request = health_pb2.HealthCheckRequest(service="baton.v1.Orchestrator")
        return int((await health_pb2_grpc.HealthStub(self.channel).Check(request)).status)

    async def busy_group(self) -> int:
        """Return the index of the generation group that runs the only stream. Waits until exactly one group runs a
        stream."""

        async def streams() -> list[int]:
            return [group.engine.status().num_streams for group in self.groups]

        return (await eventually(streams, lambda found: sum(found) == 1)).index(1)

    async def lose_group(self, lost: int) -> None:
        """Stop a generation group whose gate is shut. Open all gates when its streams have moved to other groups."""
        stopping = asyncio.create_task(self.groups[lost].stop())

        async def num_requests() -> int:
            return self.members.load(f"group-{lost}").num_requests

        await eventually(num_requests, lambda num: num == 0)
        self.open_gates()
        await stopping

    async def held(self) -> list[int]:
        """Return the base class's counts, the number of jobs of each rank, and the numbers of prefill queues and of
        generation groups for which the orchestrator has reserved load."""
        jobs = [rank.engine.status().num_jobs for rank in self.ranks]
        booked = [
            len(self.members.prefill_queues),
            len(self.server.orchestrator.scheduler.attempt_runner.chooser.context.generation_load),
        ]
        return [*await super().held(), *jobs, *booked]

    @asynccontextmanager
    async def serving(self, config: OrchestratorConfig | None) -> AsyncIterator[None]:
        """Run an orchestrator for the workers, and connect to it. At the end, check that no resource is held."""
        await self._start_orchestrator(config)
        try:
            self.members.update(self.view())
            async with make_channel(self.target, secret=SECRET) as channel:
                self.connect(channel)
                yield
                if not self.server.orchestrator.scheduler._closing:  # the test has not stopped the orchestrator
                    await self.settle()
        finally:
            await self.server.stop()

    async def restart(self) -> None:
        """Stop the orchestrator and start another one on its port, with the default configuration."""
        await self.server.stop()
        await self._start_orchestrator(None, self.server.port)

    async def _start_orchestrator(self, config: OrchestratorConfig | None, port: int = 0) -> None:
        made = start_orchestrator(self.decoder, self.members, config, self._planner, max_tokens=MAX_TOKENS, port=port)
        self.server = await made

    def open_gates(self) -> None:
        for gate in (*self.rank_gates, *self.group_gates):
            gate.open()

    async def settle(self) -> None:
        """Open all gates, send the orchestrator a view of `ranks` and `groups`, and wait until no resource is held."""
        self.open_gates()
        self.members.update(self.view())
        await self.until_empty()

    async def stop(self) -> None:
        """Open all gates and stop all workers."""
        self.open_gates()
        await asyncio.gather(*(rank.stop() for rank in self.ranks))
        await asyncio.gather(*(group.stop() for group in self.groups))


@asynccontextmanager
async def cluster(
    *,
    num_ranks: int = 2,
    num_groups: int = 1,
    num_slots: int = 16,
    config: OrchestratorConfig | None = None,
    planner: ChainPlanner | None = None,
    generate: Mapping[str, Any] = MappingProxyType({}),
    folders: Mapping[str, Path | None] = MappingProxyType({}),
    prefix_bytes: int = PLENTY,
    prefix_disk: DiskPlace | None = None,
    device: str = "cpu",
) -> AsyncIterator[BareCluster]:
    """Run a cluster without a supervisor. At the end, check that no resource is held. A test that stops a worker
    removes it from `ranks` or `groups`.

    `generate` sets further fields of the generation groups' configuration. `folders`: folders in which workers store
    prefixes, by role (prefill, generate) or name (generate-0), each with a limit of `prefix_bytes`. `device`: "cpu", or
    "emulated" for a separate emulated device per worker.
    """
    torch.set_num_threads(1)
    spawner = InProcessSpawner(
        gates={},
        is_emulated=device == "emulated",
        folders=dict(folders),
        prefix_bytes=prefix_bytes,
        prefix_disk=prefix_disk,
    )
    engine = EngineConfig(num_slots=num_slots, max_slot_tokens=MAX_TOKENS, max_waiting=num_slots, **generate)
    made = BareCluster(spawner, engine, planner)
    try:
        for _ in range(num_ranks):
            await made.add_rank()
        for _ in range(num_groups):
            await made.add_group()
        if num_ranks:
            await made.start_epoch()
        async with made.serving(config):
            yield made
    finally:
        await made.stop()
    for group in made.groups:
        assert group.slots.ledger().num_bytes_held == 0
