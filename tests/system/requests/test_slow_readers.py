"""Clients that read slowly or not at all, over real gRPC. Their calls end, memory is bounded, and no token is lost."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton import AsyncClient
from baton.errors import BatonError, NotFoundError, ResourceExhaustedError
from baton.process.clock import SystemClock
from baton.results.completion import ModelInfo
from baton.text.tokenizer import Tokenizer
from baton.transport.channel import make_channel
from baton.types import FinishReason, SampledToken, TokenEvent
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from orchestrator.admission.undelivered import Outboxes
from orchestrator.api import delivery, frontend
from orchestrator.api.checks import RequestValidator
from orchestrator.api.frontend import OrchestratorServer
from orchestrator.api.gateway import GrpcGateway, ask_model
from orchestrator.composition import build_orchestrator
from orchestrator.dispatch.token_streams import Emit
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, GenerationGroup
from orchestrator.requests.record import Attempt, RequestRecord
from tests.support.clusters.planners import linear_planner
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import chat_letters
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

HOST = "127.0.0.1"
NUM_TOKENS = 1000
TEXT = "x" * 40_000
"""Text of a token: all of them are more than gRPC holds for a client that does not read."""
MAX_BYTES = 48 * 2**20
MODEL = ModelInfo("m", 4096, 2000, "float32", False, "f")


async def at_once(record: RequestRecord, emit: Emit) -> None:
    """An attempt of an engine that is done at once."""
    record.place(SystemClock(), Attempt(generation="generate-0"))
    for index in range(len(record.choices[0].output_ids), NUM_TOKENS):
        finish = FinishReason.LENGTH if index == NUM_TOKENS - 1 else None
        accepted = record.accept(TokenEvent(index, SampledToken(index), TEXT, 1, finish))
        assert accepted is not None
        emit(accepted)


async def kept_by_none(record: RequestRecord, emit: Emit) -> None:
    raise NotFoundError("no group has kept it")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_letters(tmp_path_factory.mktemp("letters"))


@pytest.fixture
async def server(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OrchestratorServer]:
    members = Membership()
    orchestrator = build_orchestrator(members, linear_planner(), SystemClock(), secret=SECRET)
    made = await OrchestratorServer.start(orchestrator, RequestValidator(tokenizer, MODEL, ()), (HOST, 0))
    made.orchestrator.scheduler._outboxes = Outboxes(MAX_BYTES)
    monkeypatch.setattr(made.orchestrator.scheduler.attempt_runner, "attempt", at_once)
    monkeypatch.setattr(made.orchestrator.scheduler.attempt_runner, "take_over", kept_by_none)
    members.update(ClusterView(generation=(GenerationGroup("generate-0", f"{HOST}:1", "f", 64, 4096),)))
    yield made
    await made.stop()


@asynccontextmanager
async def door(server: OrchestratorServer, tokenizer: Tokenizer, kind: str) -> AsyncIterator[str]:
    """The target of the orchestrator itself, or of a gateway in front of it."""
    target = f"{HOST}:{server.port}"
    if kind == "orchestrator":
        yield target
        return
    async with make_channel(target) as channel:
        model = await ask_model(channel, 60)
        gateway = await GrpcGateway.start(channel, tokenizer, model, clock=SystemClock(), host=HOST)
        try:
            yield f"{HOST}:{gateway.port}"
        finally:
            await gateway.stop()


async def num_unread(server: OrchestratorServer) -> int:
    return server.orchestrator.scheduler._outboxes.num_bytes


@pytest.mark.parametrize("kind", ["orchestrator", "gateway"])
async def test_a_reader_that_stops_for_too_long_is_ended_and_loses_nothing_when_it_reads_on(
    server: OrchestratorServer, tokenizer: Tokenizer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "STALLED_S", 0.2)
    async with door(server, tokenizer, kind) as target, AsyncClient(target) as client:
        stream = client.generate(token_ids=[1, 2, 3], max_tokens=NUM_TOKENS, ignore_eos=True)
        await anext(stream)
        await eventually(lambda: num_unread(server), lambda num: num == 0)  # what was unread is dropped, the call ended
        monkeypatch.setattr(delivery, "STALLED_S", 60.0)
        output = await stream.collect()
    assert [token.token_id for token in output.tokens] == list(range(NUM_TOKENS))
    assert output.num_resumes > 0


async def test_200_readers_that_never_read_end_and_take_bounded_memory(
    server: OrchestratorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "STALLED_S", 1.0)
    ends: list[BatonError] = []

    async def noting(*args: Any) -> None:
        try:
            await delivery.deliver(*args)
        except BatonError as error:
            ends.append(error)
            raise

    async def num_ended() -> int:
        assert server.orchestrator.scheduler._outboxes.num_bytes <= MAX_BYTES
        return len(ends)

    monkeypatch.setattr(frontend, "deliver", noting)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
    request.sampling.max_tokens, request.sampling.ignore_eos = NUM_TOKENS, True
    options = [("grpc.http2.bdp_probe", 0)]  # else this process holds megabytes a stream as the client of all
    async with grpc.aio.insecure_channel(f"{HOST}:{server.port}", options=options) as channel:
        calls = [OrchestratorStub(channel).Generate(request) for _ in range(200)]
        await eventually(num_ended, lambda num: num == len(calls))
        assert {type(each) for each in ends} == {ResourceExhaustedError}
        assert await num_unread(server) == 0
        assert not server.orchestrator.scheduler._tasks
