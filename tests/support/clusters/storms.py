"""A relay in one process under a real supervisor, each worker behind a network, links and outlets that fail by a plan.

Real servers, engines, chains over gloo, orchestrator and supervision; a supervisor's kill ends a worker's server, which
is made anew. Calm until the plan is switched on.
"""

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from baton.clock import SystemClock
from baton.proto_types import params_to_proto
from baton.results.completion import ModelInfo
from baton.sampling_params import SamplingParams
from baton.v1 import orchestrator_pb2 as pb
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from deploy.chaos.faults import FaultPlan
from deploy.chaos.network import HOST, NetworkedSpawner
from deploy.config.worker import WorkerConfig
from deploy.groups.chain_links import ChainLinks
from deploy.groups.cluster import Cluster
from deploy.groups.group import WorkerGroup
from deploy.groups.restarts import Backoff
from deploy.groups.surroundings import Heartbeat, Surroundings
from generate_workers.config import EngineConfig
from generate_workers.servicer import GenerationServer
from modeling.forward.decoder import Decoder
from modeling.prefix_store.node import NodeStore
from orchestrator.api.frontend import OrchestratorServer
from orchestrator.membership.members import Members
from orchestrator.requests.config import OrchestratorConfig
from planning.planner import ChainPlanner
from prefill_workers.servicer import PrefillRankServicer, PrefillServer
from tests.support.clusters.orchestrators import Answer, held_by
from tests.support.clusters.planners import linear_planner
from tests.support.clusters.spawners import InProcessWorker, tiny_worker
from tests.support.engines.devices import on_emulated
from tests.support.engines.generation import eos_decoder
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import EOS_ID, letter_tokenizer
from tests.support.wire.faulty_ports import FaultyEngine
from tests.support.wire.secret import SECRET
from transport.channel import bind, make_channel, make_server

if TYPE_CHECKING:
    from baton.v1.orchestrator_pb2_grpc import OrchestratorAsyncStub

NUM_RANKS = 2
NUM_SLOTS = 6
MAX_TOKENS = 400
CLOCK = SystemClock()
HEARTBEAT = Heartbeat(interval_s=0.2, dead_after_s=1.5)
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


class FaultySpawner:
    """Makes workers of one tiny model that are servers in this process, links and outlets wrapped. Implements
    Spawner."""

    def __init__(
        self,
        decoder: Decoder,
        plan: FaultPlan,
        prefix_folder: Path | None = None,
        prefix_bytes: int = 0,
        generate: Mapping[str, Any] = MappingProxyType({}),
        *,
        may_share: bool = True,
        emulates: bool = False,
    ) -> None:
        """All of them keep prefixes in that folder, at most so many bytes; None: nowhere. `generate`: further fields of
        the generation groups' configuration. `may_share`: whether ranks push through shared memory. `emulates`: each
        worker computes on an emulated device of its own."""
        self._decoder = decoder
        self._plan = plan
        self._prefix_folder = prefix_folder
        self._prefix_bytes = prefix_bytes
        self._generate = generate
        self._may_share = may_share
        self._emulates = emulates

    async def start(self, config: WorkerConfig) -> InProcessWorker:
        return InProcessWorker(config, await self._serve(config), self._serve)

    async def _serve(self, config: WorkerConfig) -> PrefillServer | GenerationServer:
        return await (self._rank() if config.role == "prefill" else self._group())

    def _model(self) -> Decoder:
        """The model, on the device of a worker that is about to start."""
        return on_emulated(self._decoder) if self._emulates else self._decoder

    async def _rank(self) -> PrefillServer:
        server = make_server(check=SECRET.check)
        bound = bind(server, HOST)
        repeats = self._prefix_folder is None
        engine = FaultyEngine(self._model(), CLOCK, self._plan, watchdog_floor_s=1.0, repeats=repeats)
        store = None
        if self._prefix_folder is not None:
            layout = self._decoder.layout
            store = NodeStore(self._prefix_folder, layout, limit_bytes=self._prefix_bytes, clock=CLOCK)
        blocks = store.blocks if store is not None else None
        servicer = PrefillRankServicer(engine, HOST, SECRET, blocks, may_share=self._may_share)
        prefill_pb2_grpc.add_PrefillRankServicer_to_server(servicer, server)
        await server.start()
        return PrefillServer(server, servicer, bound, store)

    async def _group(self) -> GenerationServer:
        config = EngineConfig(NUM_SLOTS, MAX_TOKENS, max_waiting=NUM_SLOTS, **self._generate)
        return await GenerationServer.start(
            self._model(),
            letter_tokenizer(),
            config,
            clock=CLOCK,
            host=HOST,
            secret=SECRET,
            prefix_folder=self._prefix_folder,
            prefix_bytes=self._prefix_bytes,
        )


@dataclass
class Storm:
    """The running relay, and a client's stub."""

    decoder: Decoder
    cluster: Cluster
    stub: "OrchestratorAsyncStub"

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

    async def until_empty(self, within_s: float) -> None:
        """All workers serve, nobody waits or runs, no slot, byte or job is held, and nothing is leaked."""
        await self.cluster.until_ready(within_s)
        await eventually(self._held, lambda counts: not any(counts), within_s)

    async def _held(self) -> list[int]:
        state = await self.stub.GetClusterState(pb.GetClusterStateRequest(), timeout=10)
        counts = [state.num_queued, state.num_running]
        for group in state.groups:
            counts += [held_by(group), group.num_requests, group.num_leaked]
        ranks = [await worker.status(10) for group in self.cluster.prefill for worker in group.workers.values()]
        return counts + [rank.num_jobs for rank in ranks if isinstance(rank, prefill_pb2.PrefillStatus)]


@asynccontextmanager
async def stormy(plan: FaultPlan, num_groups: int = 2, *, may_share: bool = True) -> AsyncIterator[Storm]:
    """Everything up, and everything down again. `may_share`: whether ranks push through shared memory."""
    torch.set_num_threads(1)
    decoder, members = eos_decoder(), Members()
    spawner = NetworkedSpawner(FaultySpawner(decoder, plan, may_share=may_share), plan)

    def tell() -> None:
        members.update(cluster.view(NUM_SLOTS, MAX_TOKENS))

    around = Surroundings(spawner, HEARTBEAT, CLOCK, lambda line: None, tell, backoff=Backoff(0.2, 0.5))
    ranks = [tiny_worker("prefill", rank) for rank in range(NUM_RANKS)]
    chain = WorkerGroup("prefill-0", ranks, around, ChainLinks(HOST, 2.0))
    groups = [
        WorkerGroup(f"generate-{index}", [tiny_worker("generate", group=index)], around) for index in range(num_groups)
    ]
    cluster = Cluster([chain], groups, around)
    await cluster.start()
    try:
        async with orchestrator_over(decoder, members) as server, make_channel(f"{HOST}:{server.port}") as channel:
            yield Storm(decoder, cluster, OrchestratorStub(channel))
    finally:
        await cluster.close()


@asynccontextmanager
async def orchestrator_over(
    decoder: Decoder,
    members: Members,
    config: OrchestratorConfig = CONFIG,
    max_tokens: int = MAX_TOKENS,
    planner: ChainPlanner | None = None,
) -> AsyncIterator[OrchestratorServer]:
    """An orchestrator in this process, over workers of one tiny model."""
    layout = decoder.layout.fingerprint
    model = ModelInfo("letters", max_tokens, decoder.config.vocab_size, "float32", False, layout)
    server = await OrchestratorServer.start(
        members,
        letter_tokenizer(),
        model,
        clock=CLOCK,
        host=HOST,
        secret=SECRET,
        eos_token_ids=(EOS_ID,),
        config=config,
        planner=planner or linear_planner(),
    )
    try:
        yield server
    finally:
        await server.stop()
