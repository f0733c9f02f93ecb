"""Supervised clusters for tests: workers that end are replaced, and groups are ended and started as ordered.

The test's own process is the supervisor. Its orchestrator, if it has one, runs in the same process. The orchestrator
and the supervisor exchange orders and views of the cluster with each heartbeat. Workers are servers in this process,
optionally with planned faults, or child processes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from baton.errors import ConfigError
from baton.modeling.forward.decoder import Decoder
from baton.planning.planner import ChainPlanner
from baton.process.backoff import Backoff
from baton.sampling_params import SamplingParams
from baton.settings.place import LOOPBACK
from baton.transport.channel import make_channel
from baton.v1 import prefill_pb2
from baton_lab.chaos.faults import FaultPlan
from baton_lab.chaos.network import NetworkedSpawner
from deploy.config.worker import WorkerConfig
from deploy.groups.cluster import Cluster, group_of
from deploy.groups.group import WorkerGroup
from deploy.groups.roster import Roster
from deploy.groups.spawner import Spawner
from deploy.groups.surroundings import Heartbeat, Surroundings
from generate_workers.config import EngineConfig
from orchestrator.actuation.operations import GroupOperations
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, Orders
from orchestrator.observability.state import Overview
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.clients import CLOCK, ClusterClient, start_orchestrator
from tests.support.clusters.workers import InProcessSpawner, tiny_worker
from tests.support.engines.generation import eos_decoder, prompt, reference_ids
from tests.support.eventually import LIMIT_S
from tests.support.wire.secret import SECRET

NUM_RANKS = 2
NAMES = ("prefill-0", "generate-0", "generate-1")
TTL_S = 1.0
CONFIG = OrchestratorConfig(
    avoid_s=0.3,
    prefill_wait_s=3.0,
    generation_wait_s=20.0,
    max_attempts=8,
    lease_ttl_s=TTL_S,
    poll_s=0.2,
    disaggregation="always",
)
PATIENT = Heartbeat(interval_s=0.5, dead_after_s=20.0)
IMPATIENT = Heartbeat(interval_s=0.2, dead_after_s=4.0)
ANSWER = SamplingParams(max_tokens=40, seed=4, ignore_eos=True)
_BEAT_S = 0.05

WorkersOf = Callable[[str, Path], Sequence[WorkerConfig]]
"""Returns the configurations of a group's workers in rank order, from the group's name and its model folder."""


class CountedRoom:
    """Room with a limited number of worker places. Implements Room."""

    def __init__(self, num_places: int) -> None:
        self.taken: dict[str, int] = {}
        """Number of reserved places, by group."""
        self.num_places = num_places
        """Total number of places."""

    async def reserve(self, group: str, num_workers: int) -> None:
        others = sum(taken for name, taken in self.taken.items() if name != group)
        if others + num_workers > self.num_places:
            raise ConfigError(f"no room for {group}")
        self.taken[group] = num_workers

    async def release(self, group: str) -> None:
        self.taken.pop(group, None)


@dataclass
class SupervisedCluster(ClusterClient):
    """Supervised groups. While they are served, also their orchestrator and its client."""

    decoder: Decoder = field(default_factory=eos_decoder)
    names: Sequence[str] = NAMES
    """Names of the configured groups."""
    num_ranks: int = NUM_RANKS
    """Ranks of each prefill group."""
    num_slots: int = 2
    """Slots of each generation group."""
    max_tokens: int = 64
    """Limit on the tokens of a request, prompt and output."""
    heartbeat: Heartbeat = PATIENT
    faults: FaultPlan | None = None
    """Plan of faults for calls to workers, links and senders; None: no faults."""
    may_share: bool = True
    """True if ranks with faults may push through shared memory."""
    host: str = LOOPBACK
    """Address that links between ranks listen on."""
    processes: Spawner | None = None
    """Spawner of child processes; if it is set, it replaces `spawner`."""
    workers_of: WorkersOf | None = None
    """Returns the configurations of a group's workers. None: workers of the tiny model in this process."""
    reports: list[str] = field(default_factory=list)
    members: Membership = field(default_factory=Membership)
    cluster: Cluster = field(init=False)
    roster: Roster = field(init=False)

    def __post_init__(self) -> None:
        self.spawner = InProcessSpawner(self.decoder, faults=self.faults, may_share=self.may_share)
        spawner: Spawner = self.processes or self.spawner
        self.room = CountedRoom(NUM_RANKS + 2)
        self.around = Surroundings(
            spawner if self.faults is None else NetworkedSpawner(spawner, self.faults),
            self.heartbeat,
            CLOCK,
            self.reports.append,
            self.tell,
            backoff=Backoff(first_s=0.1, most_s=0.2),
            room=None if self.processes else self.room,
            host=self.host,
        )
        self.begin_incarnation()

    def begin_incarnation(self) -> None:
        """Start a new incarnation of the supervisor (as a restarted process), without groups."""
        self.cluster = Cluster([], [], self.around)
        self.roster = Roster(self.cluster, self.names, self.make, self.around)

    def make(self, name: str, orders: Orders) -> WorkerGroup:
        """Create a group without starting it. Implements MakeGroup."""
        folder = Path(orders.models.get(name, ""))
        workers_of = self.workers_of or self._tiny_workers
        return group_of(name, lambda group: workers_of(group, folder), self.around, orders)

    def _tiny_workers(self, name: str, folder: Path) -> Sequence[WorkerConfig]:
        role, _, number = name.partition("-")
        if role == "prefill":
            return [tiny_worker(role, rank, int(number), folder) for rank in range(self.num_ranks)]
        section = EngineConfig(self.num_slots, self.max_tokens)
        return [tiny_worker(role, 0, int(number), folder, section)]

    def view(self) -> ClusterView:
        """Return the view for the orchestrator."""
        return replace(self.cluster.view(self.num_slots, self.max_tokens), absent=self.roster.absent)

    def tell(self) -> None:
        """Send the view to the orchestrator."""
        self.members.update(self.view())

    async def start(self) -> None:
        """Start all groups."""
        for name in self.names:
            self.cluster.add(self.make(name, Orders()))
        await self.cluster.start()

    def beat(self) -> None:
        """Exchange one heartbeat with the orchestrator: apply its orders, and send it the view."""
        self.members.hear_kept(self.members.orders)
        self.roster.follow(self.members.orders)
        self.tell()

    async def supervise(self) -> None:
        """Exchange heartbeats until cancelled."""
        while True:
            self.beat()
            await self.members.until(lambda: None, _BEAT_S)

    @asynccontextmanager
    async def adopting(self, orders: Orders) -> AsyncIterator[None]:
        """Start as a cluster's next supervisor does, with the previous supervisor's `orders`. At the end, end all
        groups."""
        self.members.keep_orders(orders)
        await self.roster.adopt(orders)
        try:
            yield
        finally:
            await self.close()

    async def close(self) -> None:
        """End all groups and release their reserved places."""
        await self.roster.close()
        await self.cluster.close()
        for name in (*self.names, *self.members.orders.stand_ins):
            await self.room.release(name)

    @asynccontextmanager
    async def serving(
        self, config: OrchestratorConfig = CONFIG, planner: ChainPlanner | None = None
    ) -> AsyncIterator[None]:
        """Run an orchestrator in this process, and connect to it."""
        made = start_orchestrator(self.decoder, self.members, config, planner, max_tokens=self.max_tokens)
        self.server = await made
        try:
            async with make_channel(self.target, secret=SECRET) as channel:
                self.connect(channel)
                yield
        finally:
            await self.server.stop()

    @property
    def overview(self) -> Overview:
        """Return the Overview object of the orchestrator in this process."""
        return self.server.orchestrator.overview

    @property
    def operations(self) -> GroupOperations:
        """Return the GroupOperations object of the orchestrator in this process."""
        return self.server.orchestrator.operations

    def endpoints(self) -> dict[str, tuple[str, ...]]:
        """Return the addresses of each group's workers, by group."""
        view = self.view()
        return {group.name: group.endpoints for group in view.prefill} | {
            group.name: (group.endpoint,) for group in view.generation
        }

    async def keep_asking(self, over: asyncio.Event) -> int:
        """Run requests one after another until `over` is set, and check their tokens. Return the number of requests."""
        num_answers = 0
        prompts = [prompt(8 + more) for more in range(8)]
        expected = [reference_ids(self.decoder, token_ids, ANSWER) for token_ids in prompts]
        while not over.is_set():
            at = num_answers % len(prompts)
            assert (await self.ask(self.request(prompts[at], ANSWER))).token_ids == expected[at]
            num_answers += 1
        return num_answers

    async def until_empty(self, within_s: float = LIMIT_S) -> None:
        """Wait until all workers serve, and then until no resource is held."""
        await self.cluster.until_ready(within_s)
        await super().until_empty(within_s)

    async def held(self) -> list[int]:
        """Return the base class's counts, followed by the number of jobs that each rank itself reports."""
        ranks = [await worker.status(10) for group in self.cluster.prefill for worker in group.workers.values()]
        jobs = [rank.num_jobs for rank in ranks if isinstance(rank, prefill_pb2.PrefillStatus)]
        return [*await super().held(), *jobs]


@asynccontextmanager
async def supervised(
    made: SupervisedCluster | None = None,
    *,
    config: OrchestratorConfig = CONFIG,
    planner: ChainPlanner | None = None,
    orchestrator: bool = True,
) -> AsyncIterator[SupervisedCluster]:
    """Run a supervised cluster, by default of the tiny model. At the end, check that no worker runs and no place is
    reserved. Without `orchestrator`, the test gives orders through `members`, or calls `serving`."""
    torch.set_num_threads(1)
    made = made or SupervisedCluster()
    await made.start()
    made.beat()
    supervising = asyncio.create_task(made.supervise())
    try:
        async with made.serving(config, planner) if orchestrator else contextlib.nullcontext():
            yield made
    finally:
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising
        await made.close()
    assert all(worker.ended for worker in made.spawner.made)
    assert not made.room.taken
