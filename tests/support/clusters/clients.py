"""Client of a cluster's orchestrator, and an orchestrator in this process over workers of a tiny model of letters."""

import asyncio
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.modeling.forward.decoder import Decoder
from baton.planning.planner import ChainPlanner
from baton.process.clock import SystemClock
from baton.process.tracing import provider_of
from baton.proto_types import params_to_proto
from baton.results.completion import ModelInfo
from baton.sampling_params import SamplingParams
from baton.settings.place import LOOPBACK
from baton.transport.status_interceptor import translate_rpc_errors
from baton.v1 import common_pb2, generate_pb2
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from orchestrator.api.checks import RequestValidator
from orchestrator.api.frontend import OrchestratorServer
from orchestrator.composition import build_orchestrator
from orchestrator.membership.members import Membership
from orchestrator.observability.traces import Traces
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.planners import linear_planner
from tests.support.eventually import LIMIT_S, eventually
from tests.support.models.tiny_tokenizer import EOS_ID, letter_tokenizer
from tests.support.wire.secret import SECRET

if TYPE_CHECKING:
    from baton.v1.orchestrator_pb2_grpc import OrchestratorAsyncStub

HOST = LOOPBACK
CLOCK = SystemClock()

StreamCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateEvent]


@dataclass
class Answer:
    """All events of one stream, by kind."""

    started: pb.Started = field(default_factory=pb.Started)
    token_ids: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    text: str = ""
    finishes: dict[int, generate_pb2.FinishReason.ValueType] = field(default_factory=dict)
    """Finish reasons by choice."""
    others: dict[int, list[int]] = field(default_factory=dict)
    """Token ids of all choices except the first, by choice."""
    prompt: list[common_pb2.SampledToken] = field(default_factory=list)
    finished: pb.Finished | None = None

    @property
    def end(self) -> pb.Finished:
        """Return the last event. Fails if the stream has not ended."""
        assert self.finished is not None
        return self.finished

    async def read(self, call: StreamCall, num_tokens: int) -> None:
        """Read events until `num_tokens` tokens of the first choice have been received."""
        while len(self.token_ids) < num_tokens:
            event = await call.read()
            assert isinstance(event, pb.GenerateEvent)
            self.take(event)

    async def drain(self, call: StreamCall) -> None:
        """Read the rest of the stream. Raises the stream's error."""
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


class ClusterClient:
    """Client of an orchestrator; call `connect` first."""

    metadata: tuple[tuple[str, str], ...] = ()
    """Metadata of calls that ask for the cluster's state. It holds the API key if the orchestrator requires one."""
    server: OrchestratorServer
    """The orchestrator, if it runs in this process."""
    channel: grpc.aio.Channel
    stub: "OrchestratorAsyncStub"

    @property
    def target(self) -> str:
        """Return the address of the orchestrator, host:port."""
        return f"{HOST}:{self.server.port}"

    def connect(self, channel: grpc.aio.Channel) -> None:
        """Use `channel` for all further calls."""
        self.channel, self.stub = channel, OrchestratorStub(channel)

    def request(self, prompt_ids: Sequence[int], params: SamplingParams, **fields: Any) -> pb.GenerateRequest:
        """Return a request whose prompt is given as token ids."""
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
        """Run a request and return its answer. Raises the stream's error."""
        answer = Answer()
        await answer.drain(self.open(request, timeout_s))
        return answer

    async def state(self) -> pb.ClusterState:
        """Return the cluster's state as reported by the orchestrator. The call sends `metadata`."""
        return await self.stub.GetClusterState(pb.GetClusterStateRequest(), timeout=60, metadata=self.metadata)

    async def scrape(self) -> list[Metric]:
        """Return all metrics, as Prometheus parses them."""
        url = f"http://{HOST}:{self.server.metrics_port}/metrics"

        def read() -> str:
            with urllib.request.urlopen(url, timeout=60) as reply:
                return str(reply.read().decode())

        return list(text_string_to_metric_families(await asyncio.to_thread(read)))

    async def metrics(self) -> dict[str, float]:
        """Return the samples of all metrics by name and labels, in the form name{label="value"}."""
        return {_written(sample): sample.value for family in await self.scrape() for sample in family.samples}

    async def until_empty(self, within_s: float = LIMIT_S) -> None:
        """Wait until no request waits or runs, and no slot, byte or job is held, booked or leaked."""
        await eventually(self.held, lambda counts: not any(counts), within_s)

    async def held(self) -> list[int]:
        """Return the numbers of queued and running requests, slots, bytes and jobs that the orchestrator's state
        reports as held."""
        state = await self.state()
        counts = [state.num_queued, state.num_running]
        for group in state.groups:
            assert not group.generation.imbalance, group.generation.imbalance
            jobs = [rank.num_jobs for rank in group.ranks.values()]
            counts += [held_by(group), group.num_requests, group.num_leaked, *jobs]
        return counts


def held_by(group: pb.GroupState) -> int:
    """Return the sum of the slots and bytes that a group holds; 1 for a generation group without a status."""
    held = group.generation
    if group.role == "generate" and not group.HasField("generation"):
        return 1
    return held.num_slots - held.num_free + held.num_bytes_held


def _written(sample: Sample) -> str:
    """Return a sample's name and labels in the Prometheus text format, without empty labels."""
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()) if value)
    return f"{sample.name}{{{labels}}}" if labels else sample.name


async def start_orchestrator(
    decoder: Decoder,
    members: Membership,
    config: OrchestratorConfig | None = None,
    planner: ChainPlanner | None = None,
    *,
    max_tokens: int,
    port: int = 0,
) -> OrchestratorServer:
    """Start an orchestrator in this process for workers that serve the model of `decoder`. It also serves metrics.
    `max_tokens` limits the number of prompt and output tokens of a request."""
    layout = decoder.layout.fingerprint
    model = ModelInfo("letters", max_tokens, decoder.config.vocab_size, "float32", False, layout)
    traces = Traces(provider_of(config or OrchestratorConfig(), {"baton.model": model.name}))
    orchestrator = build_orchestrator(
        members, planner or linear_planner(), CLOCK, secret=SECRET, config=config, traces=traces
    )
    validator = RequestValidator(letter_tokenizer(), model, (EOS_ID,))
    return await OrchestratorServer.start(orchestrator, validator, (HOST, port), metrics_port=0)
