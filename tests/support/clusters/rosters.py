"""A supervised cluster in one process whose groups may leave and come back: real workers, a real orchestrator, and the
orders that go between it and the roster, as heartbeats carry them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.clock import SystemClock
from baton.errors import ConfigError
from deploy.config.worker import WorkerConfig
from deploy.groups.cluster import Cluster, group_of
from deploy.groups.group import Heartbeat, Surroundings, WorkerGroup
from deploy.groups.restarts import Backoff
from deploy.groups.roster import Roster
from orchestrator.membership.members import Members
from orchestrator.membership.view import ClusterView, Orders
from tests.support.clusters.spawners import InProcessSpawner, tiny_worker

NUM_RANKS = 2
NAMES = ("prefill-0", "generate-0", "generate-1")
_HEARTBEAT_S = 0.05


class CountedRoom:
    """Places for so many workers. Implements Room."""

    def __init__(self, num_places: int) -> None:
        self.taken: dict[str, int] = {}
        """By group."""
        self.num_places = num_places
        """In all."""

    async def reserve(self, group: str, num_workers: int) -> None:
        others = sum(taken for name, taken in self.taken.items() if name != group)
        if others + num_workers > self.num_places:
            raise ConfigError(f"no room for {group}")
        self.taken[group] = num_workers

    async def release(self, group: str) -> None:
        self.taken.pop(group, None)


@dataclass
class SupervisedCluster:
    """What a supervisor has, without a process of its own."""

    spawner: InProcessSpawner = field(default_factory=InProcessSpawner)
    room: CountedRoom = field(default_factory=lambda: CountedRoom(NUM_RANKS + 2))
    members: Members = field(default_factory=Members)
    reports: list[str] = field(default_factory=list)
    cluster: Cluster = field(init=False)
    roster: Roster = field(init=False)

    def __post_init__(self) -> None:
        self.around = Surroundings(
            self.spawner,
            Heartbeat(_HEARTBEAT_S, 5.0),
            SystemClock(),
            self.reports.append,
            self.tell,
            backoff=Backoff(first_s=0.1, most_s=0.2),
            room=self.room,
        )
        self.begin_life()

    def begin_life(self) -> None:
        """A supervisor that knows of no group yet."""
        self.cluster = Cluster([], [], self.around)
        self.roster = Roster(self.cluster, NAMES, self.make, self.around)

    def make(self, name: str, orders: Orders) -> WorkerGroup:
        """A group's next life."""
        folder = Path(orders.models.get(name, ""))

        def workers_of(group: str) -> list[WorkerConfig]:
            role, _, number = group.partition("-")
            num_workers = NUM_RANKS if role == "prefill" else 1
            return [tiny_worker(role, rank, int(number), folder) for rank in range(num_workers)]

        return group_of(name, workers_of, self.around, orders)

    def view(self) -> ClusterView:
        """As the supervisor tells it."""
        return replace(self.cluster.view(num_slots=2, max_slot_tokens=64), absent=self.roster.absent)

    def tell(self) -> None:
        """At once, as a supervisor does when something changed."""
        self.members.update(self.view())

    async def start(self) -> None:
        """All groups."""
        for name in NAMES:
            self.cluster.add(self.make(name, Orders()))
        await self.cluster.start()

    def beat(self) -> None:
        """One heartbeat: orders come to the roster, and the view goes back."""
        self.members.hear_kept(self.members.orders)
        self.roster.follow(self.members.orders)
        self.tell()

    async def supervise(self) -> None:
        """Until it is cancelled."""
        while True:
            self.beat()
            await self.members.until(lambda: None, _HEARTBEAT_S)

    async def close(self) -> None:
        """As a supervisor ends."""
        await self.roster.close()
        await self.cluster.close()
        for name in (*NAMES, *self.members.orders.stand_ins):
            await self.room.release(name)


@asynccontextmanager
async def supervised() -> AsyncIterator[SupervisedCluster]:
    """Everything up, and everything down again; in the end no worker is left, and no place is taken."""
    made = SupervisedCluster()
    await made.start()
    made.beat()
    supervising = asyncio.create_task(made.supervise())
    try:
        yield made
    finally:
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising
        await made.close()
    assert all(worker.ended for worker in made.spawner.made)
    assert not made.room.taken
