"""A supervised cluster in one process whose groups may leave and come back: real workers, a real orchestrator, and the
orders that go between it and the roster, as heartbeats carry them."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from baton.clock import SystemClock
from baton.errors import ConfigError
from baton.proto_types import params_to_proto
from baton.sampling_params import SamplingParams
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from deploy.config.worker import WorkerConfig
from deploy.groups.cluster import Cluster, group_of
from deploy.groups.group import WorkerGroup
from deploy.groups.restarts import Backoff
from deploy.groups.roster import Roster
from deploy.groups.surroundings import Heartbeat, Surroundings
from modeling.forward.decoder import Decoder
from orchestrator.membership.members import Members
from orchestrator.membership.view import ClusterView, Orders
from orchestrator.observability.state import Overview
from tests.support.clusters.orchestrators import Answer
from tests.support.clusters.spawners import HOST, InProcessSpawner, tiny_worker
from tests.support.clusters.storms import orchestrator_over
from tests.support.engines.generation import prompt, reference_ids
from tests.support.wire.secret import SECRET
from transport.channel import make_channel

if TYPE_CHECKING:
    from baton.v1.orchestrator_pb2_grpc import OrchestratorAsyncStub

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

    num_ranks: int = NUM_RANKS
    """Of a chain."""
    spawner: InProcessSpawner = field(default_factory=InProcessSpawner)
    room: CountedRoom = field(default_factory=lambda: CountedRoom(NUM_RANKS + 2))
    members: Members = field(default_factory=Members)
    reports: list[str] = field(default_factory=list)
    cluster: Cluster = field(init=False)
    roster: Roster = field(init=False)

    def __post_init__(self) -> None:
        self.around = Surroundings(
            self.spawner,
            Heartbeat(0.5, 20.0),
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
            num_workers = self.num_ranks if role == "prefill" else 1
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
async def supervised(num_ranks: int = NUM_RANKS) -> AsyncIterator[SupervisedCluster]:
    """Everything up, and everything down again; in the end no worker is left, and no place is taken."""
    made = SupervisedCluster(num_ranks)
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


ANSWER = SamplingParams(max_tokens=40, seed=4, ignore_eos=True)
MAX_TOKENS = 64


@dataclass(frozen=True)
class Served:
    """A supervised cluster behind an orchestrator."""

    cluster: SupervisedCluster
    overview: Overview
    target: str
    stub: "OrchestratorAsyncStub"

    def endpoints(self) -> dict[str, tuple[str, ...]]:
        """Of each group."""
        view = self.cluster.view()
        return {group.name: group.endpoints for group in view.prefill} | {
            group.name: (group.endpoint,) for group in view.generation
        }

    async def ask(self, token_ids: tuple[int, ...]) -> list[int]:
        """A stream to its end."""
        request = pb.GenerateRequest(
            request_id=uuid.uuid4().hex,
            token_ids=pb.TokenIds(ids=token_ids),
            sampling=params_to_proto(ANSWER),
            seeded=True,
        )
        answer = Answer()
        await answer.drain(self.stub.Generate(request, timeout=60))
        return answer.token_ids

    async def keep_asking(self, decoder: Decoder, over: asyncio.Event) -> int:
        """Streams, one after another, all as they should be; how many there were."""
        num_answers = 0
        prompts = [prompt(8 + more) for more in range(8)]
        expected = [reference_ids(decoder, token_ids, ANSWER) for token_ids in prompts]
        while not over.is_set():
            at = num_answers % len(prompts)
            assert await self.ask(prompts[at]) == expected[at]
            num_answers += 1
        return num_answers


@asynccontextmanager
async def served(decoder: Decoder) -> AsyncIterator[Served]:
    """All of it, and an orchestrator that serves clients."""
    async with (
        supervised() as cluster,
        orchestrator_over(decoder, cluster.members, max_tokens=MAX_TOKENS) as server,
        make_channel(f"{HOST}:{server.port}", secret=SECRET) as channel,
    ):
        overview = server.controller.overview
        yield Served(cluster, overview, f"{HOST}:{server.port}", OrchestratorStub(channel))
