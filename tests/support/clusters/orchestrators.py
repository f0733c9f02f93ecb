"""A relay in one process: real prefill ranks over gloo, real generation groups, a real orchestrator, a channel."""

import asyncio
import urllib.request
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc
import torch
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from torch.distributed import TCPStore

from baton.clock import SystemClock
from baton.ids import Epoch
from baton.proto_types import params_to_proto
from baton.results.completion import ModelInfo
from baton.sampling_params import SamplingParams
from baton.v1 import common_pb2, generate_pb2, prefill_pb2
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from baton.v1.prefill_pb2_grpc import PrefillRankStub
from generate_workers.config import EngineConfig
from generate_workers.servicer import GenerationServer
from modeling.device.making import make_device
from modeling.forward.decoder import Decoder
from modeling.prefix_store.node import DiskPlace
from orchestrator.api.frontend import OrchestratorServer
from orchestrator.membership.members import Members
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.requests.config import OrchestratorConfig
from planning.planner import ChainPlanner
from prefill_workers.servicer import PrefillServer
from tests.support.clusters.planners import linear_planner
from tests.support.engines.gated_kernels import Gate
from tests.support.engines.generation import eos_decoder
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import EOS_ID, letter_grammars, letter_tokenizer
from tests.support.wire.secret import SECRET
from transport.channel import make_channel
from transport.status import translate_rpc_errors

if TYPE_CHECKING:
    from baton.v1.orchestrator_pb2_grpc import OrchestratorAsyncStub

HOST = "127.0.0.1"
MAX_TOKENS = 400
CLOCK = SystemClock()
HASTY = OrchestratorConfig(avoid_s=0.2, prefill_wait_s=0.3, generation_wait_s=0.5)
"""Of little patience."""

StreamCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateEvent]


def held_by(group: pb.GroupState) -> int:
    """Slots and bytes that a group holds; 1 for a generation group that does not say."""
    held = group.generation
    if group.role == "generate" and not group.HasField("generation"):
        return 1
    return held.num_slots - held.num_free + held.num_bytes_held


def written(sample: Sample) -> str:
    """A sample's name and labels, as in the text; empty labels are none."""
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()) if value)
    return f"{sample.name}{{{labels}}}" if labels else sample.name


@dataclass
class Answer:
    """All that one stream brought."""

    started: pb.Started = field(default_factory=pb.Started)
    token_ids: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    text: str = ""
    finishes: dict[int, generate_pb2.FinishReason.ValueType] = field(default_factory=dict)
    """By choice."""
    others: dict[int, list[int]] = field(default_factory=dict)
    """Token ids of the choices but the first."""
    prompt: list[common_pb2.SampledToken] = field(default_factory=list)
    finished: pb.Finished | None = None

    async def read(self, call: StreamCall, num_tokens: int) -> None:
        """Takes events until so many tokens have come."""
        while len(self.token_ids) < num_tokens:
            event = await call.read()
            assert isinstance(event, pb.GenerateEvent)
            self.take(event)

    async def drain(self, call: StreamCall) -> None:
        """Takes the rest; raises the stream's error."""
        with translate_rpc_errors():
            while isinstance(event := await call.read(), pb.GenerateEvent):
                self.take(event)

    def take(self, event: pb.GenerateEvent) -> None:
        assert self.finished is None, "an event after the last"
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "token":
                self._take_token(event.token)
            case "finished":
                self.finished = event.finished

    def _take_token(self, event: generate_pb2.TokenEvent) -> None:
        assert event.choice not in self.finishes, "an event after a choice's last"
        self.prompt.extend(event.prompt)
        if event.finish:
            self.finishes[event.choice] = event.finish
        if event.choice:
            output = self.others.setdefault(event.choice, [])
            assert event.index == len(output)
            output += [event.token.token_id] if event.HasField("token") else []
            return
        self.text += event.text
        if event.HasField("token"):
            self.token_ids.append(event.token.token_id)
            self.indices.append(event.index)


@dataclass
class Relay:
    """A running orchestrator, its workers, and a client's stub."""

    decoder: Decoder
    members: Members
    num_slots: int
    store: TCPStore
    planner: ChainPlanner
    ranks: list[PrefillServer] = field(default_factory=list)
    rank_gates: list[Gate] = field(default_factory=list)
    groups: list[GenerationServer] = field(default_factory=list)
    group_gates: list[Gate] = field(default_factory=list)
    epoch: int = 0
    device: str = "cpu"
    prefix_folder: Path | None = None
    """Where the ranks keep prefixes, at most `prefix_bytes` of them; None: nowhere."""
    prefix_bytes: int = 0
    group_folder: Path | None = None
    """Where the generation groups do, up to as much; the same one for those of the same node."""
    group_folders: Sequence[Path] = ()
    """Where each of the first groups does, in place of that: each on a node of its own."""
    prefix_disk: DiskPlace | None = None
    """Of all of them."""
    generate: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the generation groups' configuration."""
    fronts: dict[int, str] = field(default_factory=dict)
    """By a worker's port, what the orchestrator is told instead of it: host:port of what stands before it."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Sent with questions about the state, which need a key where all calls do."""
    channel: grpc.aio.Channel = field(init=False)
    stub: "OrchestratorAsyncStub" = field(init=False)
    server: OrchestratorServer = field(init=False)

    async def add_rank(self) -> None:
        decoder, gate = self._gated()
        self.ranks.append(
            await PrefillServer.start(
                decoder,
                clock=CLOCK,
                host=HOST,
                secret=SECRET,
                prefix_folder=self.prefix_folder,
                prefix_bytes=self.prefix_bytes,
                prefix_disk=self.prefix_disk,
                grammars=letter_grammars(),
            )
        )
        self.rank_gates.append(gate)

    async def add_group(self) -> None:
        decoder, gate = self._gated()
        num_slots, folders = self.num_slots, self.group_folders
        config = EngineConfig(num_slots=num_slots, max_slot_tokens=MAX_TOKENS, max_waiting=num_slots, **self.generate)
        server = await GenerationServer.start(
            decoder,
            letter_tokenizer(),
            config,
            clock=CLOCK,
            host=HOST,
            secret=SECRET,
            prefix_folder=folders[len(self.groups)] if len(self.groups) < len(folders) else self.group_folder,
            prefix_bytes=self.prefix_bytes,
            prefix_disk=self.prefix_disk,
        )
        self.groups.append(server)
        self.group_gates.append(gate)

    async def start_epoch(self) -> None:
        """Links the ranks, anew."""
        self.epoch += 1

        async def join(rank: int) -> None:
            request = prefill_pb2.StartEpochRequest(
                epoch=self.epoch,
                rank=rank,
                num_ranks=len(self.ranks),
                store=f"{HOST}:{self.store.port}",
                timeout_s=20,
            )
            async with make_channel(f"{HOST}:{self.ranks[rank].port}", secret=SECRET) as channel:
                await PrefillRankStub(channel).StartEpoch(request)

        await asyncio.gather(*(join(rank) for rank in range(len(self.ranks))))

    def _gated(self) -> tuple[Decoder, Gate]:
        gate = Gate(self.decoder.kernel)
        return Decoder(self.decoder.config, self.decoder.weights, gate, device=make_device(self.device)), gate

    def view(self, *, prefill_ready: bool = True) -> ClusterView:
        """What a supervisor would say now."""
        endpoints = tuple(self._endpoint(rank.port) for rank in self.ranks)
        layout = self.decoder.layout.fingerprint
        prefixes = self.ranks[0].prefixes if self.ranks else None
        store = prefixes.identity if prefixes is not None else ""
        return ClusterView(
            prefill=(PrefillGroup("chain", endpoints, Epoch(self.epoch), prefill_ready, store),) if endpoints else (),
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

    def request(self, prompt_ids: Sequence[int], params: SamplingParams, **fields: Any) -> pb.GenerateRequest:
        """A request for token ids."""
        return pb.GenerateRequest(
            request_id=uuid.uuid4().hex,
            token_ids=pb.TokenIds(ids=prompt_ids),
            sampling=params_to_proto(params),
            seeded=True,
            **fields,
        )

    def open(self, request: pb.GenerateRequest, timeout_s: float | None = 60) -> StreamCall:
        return self.stub.Generate(request, timeout=timeout_s)

    async def ask(self, request: pb.GenerateRequest, timeout_s: float | None = 60) -> Answer:
        """A stream to its end; raises its error."""
        answer = Answer()
        await answer.drain(self.open(request, timeout_s))
        return answer

    async def held_up(self, request: pb.GenerateRequest) -> tuple[StreamCall, Answer, str]:
        """A stream that stands still after its first tokens, what came of it, and its generation group's name. The
        gates of the other groups are open."""
        for gate in self.group_gates:
            gate.shut(num_passes=4 * self.decoder.config.num_layers)
        call, answer = self.open(request), Answer()
        await answer.read(call, 3)
        names = [f"group-{number}" for number in range(len(self.groups))]
        (busy,) = (number for number, name in enumerate(names) if self.members.load(name).num_requests)
        for gate in (*self.group_gates[:busy], *self.group_gates[busy + 1 :]):
            gate.open()
        return call, answer, names[busy]

    async def state(self) -> pb.ClusterState:
        """What the orchestrator says of itself to a caller with `metadata`."""
        return await self.stub.GetClusterState(pb.GetClusterStateRequest(), timeout=10, metadata=self.metadata)

    async def busy_group(self) -> int:
        """Which generation group has the one stream that runs, or is about to; one that goes on until it is found."""

        async def streams() -> list[int]:
            return [group.engine.status().num_streams for group in self.groups]

        return (await eventually(streams, lambda found: sum(found) == 1, within_s=10)).index(1)

    async def lose_group(self, lost: int) -> None:
        """Ends a generation group behind its shut gate. The gates open once its streams have left it: they end
        elsewhere."""
        stopping = asyncio.create_task(self.groups[lost].stop())

        async def num_requests() -> int:
            return self.members.load(f"group-{lost}").num_requests

        await eventually(num_requests, lambda num: num == 0, within_s=20)
        for gate in self.group_gates:
            gate.open()
        await stopping

    async def scrape(self) -> list[Metric]:
        """All metrics, as Prometheus reads them."""
        url = f"http://{HOST}:{self.server.metrics_port}/metrics"

        def read() -> str:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return str(reply.read().decode())

        return list(text_string_to_metric_families(await asyncio.to_thread(read)))

    async def metrics(self) -> dict[str, float]:
        """Their samples, by name and labels as they are written: name{label="value"}."""
        return {written(sample): sample.value for family in await self.scrape() for sample in family.samples}

    async def until_empty(self, within_s: float = 10.0) -> None:
        """Nobody waits or runs, no slot, byte or job is held or booked, soon; and nothing is leaked."""

        async def held() -> list[int]:
            state = await self.state()
            slots = [held_by(group) for group in state.groups]
            jobs = [rank.engine.status().num_jobs for rank in self.ranks]
            requests = [state.num_queued, state.num_running, *(group.num_requests for group in state.groups)]
            booked = [len(self.members.backlogs), len(self.server.controller._dispatcher.chooser.occupancy)]
            return [*slots, *jobs, *requests, *booked, *(group.num_leaked for group in state.groups)]

        await eventually(held, lambda counts: not any(counts), within_s)

    @asynccontextmanager
    async def serving(self, config: OrchestratorConfig | None) -> AsyncIterator[None]:
        """An orchestrator over the workers, and a channel to it."""
        layout, vocab_size = self.decoder.layout.fingerprint, self.decoder.config.vocab_size
        model = ModelInfo("letters", MAX_TOKENS, vocab_size, "float32", False, layout)
        self.server = await OrchestratorServer.start(
            self.members,
            letter_tokenizer(),
            model,
            clock=CLOCK,
            host=HOST,
            secret=SECRET,
            eos_token_ids=(EOS_ID,),
            config=config,
            planner=self.planner,
            metrics_port=0,
        )
        self.members.update(self.view())
        try:
            async with make_channel(f"{HOST}:{self.server.port}", secret=SECRET) as self.channel:
                self.stub = OrchestratorStub(self.channel)
                yield
        finally:
            await self.server.stop()

    async def stop(self) -> None:
        for gate in (*self.rank_gates, *self.group_gates):
            gate.open()
        await asyncio.gather(*(rank.stop() for rank in self.ranks))
        await asyncio.gather(*(group.stop() for group in self.groups))


@asynccontextmanager
async def relay(
    *,
    num_ranks: int = 2,
    num_groups: int = 1,
    num_slots: int = 16,
    config: OrchestratorConfig | None = None,
    planner: ChainPlanner | None = None,
    prefix_folder: Path | None = None,
    prefix_bytes: int = 1 << 30,
    group_folder: Path | None = None,
    group_folders: Sequence[Path] = (),
    prefix_disk: DiskPlace | None = None,
    generate: Mapping[str, Any] = MappingProxyType({}),
    device: str = "cpu",
) -> AsyncIterator[Relay]:
    """Everything up, and everything down again; at the end no worker holds anything."""
    torch.set_num_threads(1)
    store = await asyncio.to_thread(TCPStore, HOST, 0, None, True, wait_for_workers=False)
    made = Relay(eos_decoder(), Members(), num_slots, store, planner or linear_planner())
    made.prefix_folder, made.prefix_bytes, made.group_folder = prefix_folder, prefix_bytes, group_folder
    made.prefix_disk, made.generate, made.group_folders, made.device = prefix_disk, generate, group_folders, device
    try:
        for _ in range(num_ranks):
            await made.add_rank()
        for _ in range(num_groups):
            await made.add_group()
        await made.start_epoch()
        async with made.serving(config):
            yield made
    finally:
        await made.stop()
    for group in made.groups:
        assert group.slots.ledger().num_bytes_held == 0
