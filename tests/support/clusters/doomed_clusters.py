"""A relay of real processes under a real supervisor, whose prefill ranks end at steps that a test picks.

Two prefill groups, of two ranks and of one, over one generation engine; the orchestrator is in this process.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from baton.proto_types import params_to_proto
from baton.sampling_params import SamplingParams
from baton.v1 import generate_pb2, prefill_pb2
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from deploy.groups.chain_links import ChainLinks
from deploy.groups.cluster import Cluster
from deploy.groups.group import WorkerGroup
from deploy.groups.processes import ProcessSpawner
from deploy.groups.restarts import Backoff
from deploy.groups.surroundings import Heartbeat, Surroundings
from deploy.groups.worker import Worker
from generate_workers.config import EngineConfig
from modeling.checkpoints.weights import load_decoder
from modeling.forward.decoder import Decoder
from orchestrator.membership.members import Members
from orchestrator.requests.config import OrchestratorConfig
from prefill_workers.config import PrefillConfig
from tests.support.clusters.doomed_worker import Doom, is_pending
from tests.support.clusters.orchestrators import Answer
from tests.support.clusters.spawners import HOST, tiny_worker
from tests.support.clusters.storms import CLOCK, orchestrator_over
from tests.support.eventually import eventually
from tests.support.models.letter_models import MAX_TOKENS
from transport.channel import make_channel

if TYPE_CHECKING:
    from baton.v1.orchestrator_pb2_grpc import OrchestratorAsyncStub

GROUP_SIZES = (2, 1)
NUM_SLOTS = 8
DEAD_AFTER_S = 8.0
FLOOR_S = 8.0
CONFIG = OrchestratorConfig(
    avoid_s=0.3, prefill_wait_s=60.0, generation_wait_s=60.0, max_attempts=8, lease_ttl_s=15.0, disaggregation="always"
)
"""A request waits for a group that is being replaced: none is prefilled by the generation engine."""


@dataclass
class DoomedCluster:
    """The running relay, and a client's stub."""

    folder: Path
    decoder: Decoder
    cluster: Cluster
    reports: list[str]
    stub: "OrchestratorAsyncStub" = field(init=False)

    def worker(self, group: int, rank: int) -> Worker:
        """A prefill rank, in its present life."""
        return self.cluster.prefill[group].workers[rank]

    def doom(self, group: int, rank: int, doom: Doom) -> None:
        doom.lay(self.folder, self.worker(group, rank).name)

    def is_doomed(self, group: int, rank: int) -> bool:
        """What was laid for the rank has not struck."""
        return is_pending(self.folder, self.worker(group, rank).name)

    def life(self, group: int) -> tuple[int, tuple[str, ...]]:
        """What is another after a group was repaired."""
        made = self.cluster.prefill[group]
        assert made.links is not None
        return made.links.epoch, made.endpoints

    async def ask(self, prompt_ids: Sequence[int], params: SamplingParams) -> Answer:
        """A stream to its end; raises its error."""
        request = pb.GenerateRequest(
            request_id=uuid.uuid4().hex,
            token_ids=pb.TokenIds(ids=prompt_ids),
            sampling=params_to_proto(params),
            seeded=True,
        )
        answer = Answer()
        await answer.drain(self.stub.Generate(request))
        return answer

    async def until_repaired(self, group: int, life: tuple[int, tuple[str, ...]], within_s: float) -> None:
        """The group has another life than that, and serves."""

        async def present() -> tuple[int, tuple[str, ...]]:
            return self.life(group)

        await eventually(present, lambda now: now[0] != life[0] and now[1] != life[1], within_s)
        await self.cluster.until_ready(within_s)

    async def until_empty(self, within_s: float) -> None:
        """Nobody waits or runs, no slot, byte or job is held, and nothing is leaked. All workers serve."""
        await eventually(self._held, lambda counts: not any(counts), within_s)

    async def _held(self) -> list[int]:
        state = await self.stub.GetClusterState(pb.GetClusterStateRequest(), timeout=10)
        engine = await self.cluster.generation[0].workers[0].status(10)
        assert isinstance(engine, generate_pb2.GenerationStatus)
        counts = [state.num_queued, state.num_running, engine.num_slots - engine.num_free, engine.num_bytes_held]
        for group, size in enumerate(GROUP_SIZES):
            for rank in range(size):
                status = await self.worker(group, rank).status(10)
                assert isinstance(status, prefill_pb2.PrefillStatus)
                counts.append(status.num_jobs)
        return counts + [group.num_leaked for group in state.groups]


@asynccontextmanager
async def doomed_cluster(folder: Path) -> AsyncIterator[DoomedCluster]:
    """Everything up, over the letter model in `folder`, and everything down again: no process is left."""
    members, reports, pids = Members(), list[str](), set[int]()

    def tell() -> None:
        members.update(cluster.view(NUM_SLOTS, MAX_TOKENS))
        groups = (*cluster.prefill, *cluster.generation)
        pids.update(worker.handle.pid for group in groups for worker in group.workers.values())

    spawner = ProcessSpawner(60.0, "tests.support.clusters.doomed_worker")
    heartbeat = Heartbeat(interval_s=0.5, dead_after_s=DEAD_AFTER_S)
    around = Surroundings(spawner, heartbeat, CLOCK, reports.append, tell, backoff=Backoff(0.1, 0.2))

    def group(role: str, index: int, size: int = 1) -> WorkerGroup:
        engine = EngineConfig(num_slots=NUM_SLOTS, max_slot_tokens=MAX_TOKENS)
        section = PrefillConfig(watchdog_floor_s=FLOOR_S) if role == "prefill" else engine
        configs = [replace(tiny_worker(role, rank, index, folder), section=section) for rank in range(size)]
        links = ChainLinks(HOST, 10.0) if role == "prefill" else None
        return WorkerGroup(f"{role}-{index}", configs, around, links)

    chains = [group("prefill", index, size) for index, size in enumerate(GROUP_SIZES)]
    cluster = Cluster(chains, [group("generate", 0)], around)
    made = DoomedCluster(folder, load_decoder(folder, dtype="float32"), cluster, reports)
    await cluster.start()
    try:
        async with (
            orchestrator_over(made.decoder, members, CONFIG, MAX_TOKENS) as server,
            make_channel(f"{HOST}:{server.port}") as channel,
        ):
            made.stub = OrchestratorStub(channel)
            yield made
    finally:
        await cluster.close()
    alive = await asyncio.to_thread(lambda: [pid for pid in pids if _is_alive(pid)])
    assert not alive, f"processes left: {alive}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
