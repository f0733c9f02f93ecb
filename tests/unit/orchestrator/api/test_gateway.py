"""A gateway over a scripted orchestrator, asked by the ordinary client: what it passes on, both ways."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import AsyncClient, Reconnect
from baton.calls.requests import call_metadata
from baton.errors import (
    ConfigError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.process.clock import SystemClock
from baton.results.completion import ModelInfo
from baton.text.tokenizer import Tokenizer
from baton.transport.channel import make_channel
from baton.v1 import common_pb2
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from orchestrator.api.checks import RequestValidator
from orchestrator.api.frontend import OrchestratorServer
from orchestrator.api.gateway import SERVICE, GrpcGateway, ask_model
from orchestrator.composition import build_orchestrator
from orchestrator.membership.members import Membership
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import Tenant, Tenants, hash_key
from tests.support.clusters.planners import linear_planner
from tests.support.clusters.scripted_orchestrator import MODEL, STATE, Fault, ScriptedOrchestrator, serving, text_of
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import chat_letters, ids_of, write_letters
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

HOST = "127.0.0.1"
HASTY = Reconnect(num_resumes=20, first_delay_s=0.01, max_delay_s=0.1)
ONCE = Reconnect(num_connects=1, num_resumes=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_letters(tmp_path_factory.mktemp("letters"))


@asynccontextmanager
async def gateway_of(target: str, tokenizer: Tokenizer, port: int = 0) -> AsyncIterator[GrpcGateway]:
    async with make_channel(target) as orchestrator:
        model = await ask_model(orchestrator, 60)
        made = await GrpcGateway.start(orchestrator, tokenizer, model, clock=SystemClock(), host=HOST, port=port)
        try:
            yield made
        finally:
            await made.stop()


@asynccontextmanager
async def through(
    service: ScriptedOrchestrator, tokenizer: Tokenizer, reconnect: Reconnect = HASTY, **more: Any
) -> AsyncIterator[AsyncClient]:
    """A client of a gateway of the scripted orchestrator."""
    async with (
        serving(service) as target,
        gateway_of(target, tokenizer) as gateway,
        AsyncClient(f"{HOST}:{gateway.port}", reconnect=reconnect, **more) as client,
    ):
        yield client


async def test_text_becomes_token_ids_and_the_rest_stays(tokenizer: Tokenizer) -> None:
    service = ScriptedOrchestrator()
    async with through(service, tokenizer) as client:
        stream = client.generate(
            "Hi there", max_tokens=3, temperature=0.5, seed=4, priority="batch", request_id="mine", deadline_s=30
        )
        output = await stream.collect()
    (asked,) = service.requests
    assert tuple(asked.token_ids.ids) == ids_of("Hi there")
    assert (asked.request_id, asked.model, asked.priority) == ("mine", MODEL.name, pb.PRIORITY_BATCH)
    assert (asked.sampling.temperature, asked.sampling.seed, asked.seeded) == (0.5, 4, True)
    assert 20_000 < asked.deadline_ms <= 30_000
    assert output.text == text_of(3)
    assert output.usage is not None and output.timings is not None and output.timings.prefill.ranks


async def test_a_chat_is_rendered(tokenizer: Tokenizer) -> None:
    service = ScriptedOrchestrator()
    async with through(service, tokenizer) as client:
        await client.generate(messages=[{"role": "user", "content": "Hi"}], max_tokens=1).collect()
    assert tokenizer.decode(service.requests[0].token_ids.ids) == "user: Hiassistant: "


async def test_who_asks_is_passed_on(tokenizer: Tokenizer) -> None:
    service = ScriptedOrchestrator()
    async with through(service, tokenizer, api_key="secret", tenant="one") as client:
        await client.generate("Hi", max_tokens=1, metadata={"x-other": "thing"}).collect()
    (metadata,) = service.metadata
    passed = [metadata[name] for name in ("authorization", "baton-tenant", "x-other")]
    assert passed == ["Bearer secret", "one", "thing"]


@pytest.mark.parametrize("method", ["Admin/Drain", "Admin/Undrain", "Admin/Flip", "Admin/GetTrace"])
async def test_nothing_of_operators_is_passed_on(tokenizer: Tokenizer, method: str) -> None:
    """The orchestrator hears a gateway of its own machine, whoever its client is."""
    async with (
        serving(ScriptedOrchestrator()) as target,
        gateway_of(target, tokenizer) as gateway,
        make_channel(f"{HOST}:{gateway.port}") as channel,
    ):
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/baton.v1.{method}")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(b"", metadata=(("authorization", "Bearer secret"),))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_gateway_has_a_key_for_its_own_calls_and_clients_send_theirs(tokenizer: Tokenizer) -> None:
    """Over an orchestrator that answers nobody without a key."""
    own = call_metadata("gateway-key", None)
    tenants = tuple(Tenant(name, key_hashes=(hash_key(f"{name}-key"),)) for name in ("gateway", "acme"))
    config = OrchestratorConfig(tenants=Tenants(tenants, require_key=True))
    model = ModelInfo("letters", 400, 64, "float32", False, "layout")
    clock = SystemClock()
    built = build_orchestrator(Membership(), linear_planner(), clock, secret=SECRET, config=config)
    server = await OrchestratorServer.start(built, RequestValidator(tokenizer, model, ()), (HOST, 0))
    try:
        async with make_channel(f"{HOST}:{server.port}") as orchestrator:
            with pytest.raises(UnauthenticatedError, match="the call has no API key"):
                await ask_model(orchestrator, 60)
            served = await ask_model(orchestrator, 60, own)
            gateway = await GrpcGateway.start(orchestrator, tokenizer, served, clock=clock, host=HOST, caller=own)
            async with AsyncClient(f"{HOST}:{gateway.port}", reconnect=ONCE) as nobody:
                for asked in (nobody.generate("Hi", max_tokens=1).collect(), nobody.cluster_state(), nobody.model()):
                    with pytest.raises(UnauthenticatedError, match="the call has no API key"):
                        await asked
            async with AsyncClient(f"{HOST}:{gateway.port}", api_key="acme-key", reconnect=ONCE) as somebody:
                assert (await somebody.cluster_state()).num_running == 0
                assert (await somebody.model()).name == "letters"
            await gateway.stop()
    finally:
        await server.stop()


async def test_an_echo_is_the_very_prompt(tokenizer: Tokenizer) -> None:
    service = ScriptedOrchestrator()
    async with through(service, tokenizer) as client:
        output = await client.generate("<s>Hi", max_tokens=2, echo=True).collect()
    assert output.text == "<s>Hi" + text_of(2)
    assert not service.requests[0].echo


async def test_what_no_field_may_be_is_refused_at_once(tokenizer: Tokenizer) -> None:
    service = ScriptedOrchestrator()
    async with through(service, tokenizer) as client:
        for stream, named in (
            (client.generate(""), "prompt is empty"),
            (client.generate("Hi", model="other"), "'other' is unknown"),
            (client.generate(token_ids=[10**6]), "token_ids holds 1000000"),
            (client.generate("Hi", max_tokens=5000), "max_tokens = 5000"),
        ):
            with pytest.raises(InvalidArgumentError, match=named):
                await stream.collect()
    assert not service.requests


async def test_a_refusal_brings_its_retry_delay(tokenizer: Tokenizer) -> None:
    full = Fault(error=ResourceExhaustedError("full", retry_after_s=2.5), before_started=True)
    async with through(ScriptedOrchestrator([full]), tokenizer, ONCE) as client:
        with pytest.raises(ResourceExhaustedError, match="^full$") as caught:
            await client.generate("Hi").collect()
    assert caught.value.retry_after_s == 2.5


async def test_a_client_that_leaves_cancels_everywhere(tokenizer: Tokenizer) -> None:
    service = ScriptedOrchestrator([Fault(after=1, hang=True)])
    async with through(service, tokenizer) as client:
        async with client.generate("Hi", max_tokens=4) as stream:
            await anext(stream)
            await asyncio.wait_for(service.hanging.wait(), 60)
        await asyncio.wait_for(service.cancelled.wait(), 60)


async def test_a_stream_goes_on_after_the_orchestrators_restart(tokenizer: Tokenizer) -> None:
    first, second = ScriptedOrchestrator([Fault(after=2, hang=True)]), ScriptedOrchestrator()
    async with AsyncExitStack() as stack:
        async with serving(first) as target:
            gateway = await stack.enter_async_context(gateway_of(target, tokenizer))
            client = await stack.enter_async_context(AsyncClient(f"{HOST}:{gateway.port}", reconnect=HASTY))
            stream = client.generate("Hi", max_tokens=5)
            await anext(stream)
            await asyncio.wait_for(first.hanging.wait(), 60)
        await stack.enter_async_context(serving(second, port=int(target.rsplit(":")[-1])))
        output = await asyncio.wait_for(stream.collect(), 60)
    assert output.text == text_of(5)
    assert list(second.requests[-1].outputs[0].token_ids) == [1000, 1001]


async def test_a_stream_goes_on_where_the_orchestrator_has_moved_to(tokenizer: Tokenizer) -> None:
    first, second = ScriptedOrchestrator([Fault(after=2, hang=True)]), ScriptedOrchestrator()
    async with (
        serving(first) as before,  # which does not end: a host that is cut off does not close its connections
        serving(second) as after,
        gateway_of(before, tokenizer) as gateway,
        make_channel(before) as former,
        make_channel(after) as present,
        AsyncClient(f"{HOST}:{gateway.port}", reconnect=HASTY) as client,
    ):
        await gateway.move(former)
        stream = client.generate("Hi", max_tokens=5)
        await anext(stream)
        await asyncio.wait_for(first.hanging.wait(), 60)
        await gateway.move(present)
        await former.close()
        output = await asyncio.wait_for(stream.collect(), 60)
        assert (await client.model()).name == MODEL.name
    assert (output.text, output.num_resumes) == (text_of(5), 1)
    assert list(second.requests[-1].outputs[0].token_ids) == [1000, 1001]


async def test_a_gateway_that_ends_sends_its_clients_elsewhere(tokenizer: Tokenizer) -> None:
    service = ScriptedOrchestrator([Fault(after=2, hang=True)])
    async with serving(service) as target, gateway_of(target, tokenizer) as other:
        async with gateway_of(target, tokenizer) as gateway:
            both = f"ipv4:{HOST}:{gateway.port},{HOST}:{other.port}"
            client = AsyncClient(both, reconnect=HASTY)
            stream = client.generate("Hi", max_tokens=5)
            await anext(stream)
            await asyncio.wait_for(service.hanging.wait(), 60)
        output = await asyncio.wait_for(stream.collect(), 60)
        await client.close()
    assert (output.text, output.num_resumes) == (text_of(5), 1)


async def test_a_stop_lets_streams_end_in_time(tokenizer: Tokenizer) -> None:
    service = ScriptedOrchestrator([Fault(after=2, hang=True)])
    async with (
        serving(service) as target,
        gateway_of(target, tokenizer) as gateway,
        AsyncClient(f"{HOST}:{gateway.port}", reconnect=ONCE) as client,
    ):
        hanging = client.generate("Hi", max_tokens=5)
        await anext(hanging)
        running = client.generate("Hi", max_tokens=100)
        await anext(running)
        stopping = asyncio.create_task(gateway.stop(grace_s=60.0))
        assert (await running.collect()).text == text_of(100)
        await gateway.stop()  # which ends the time given
        with pytest.raises(UnavailableError, match="shutting down"):
            await hanging.collect()
        await stopping


async def test_a_gateway_that_ends_turns_new_connections_away_at_once(tokenizer: Tokenizer) -> None:
    service = ScriptedOrchestrator([Fault(after=2, hang=True)])
    async with (
        serving(service) as target,
        gateway_of(target, tokenizer) as gateway,
        AsyncClient(f"{HOST}:{gateway.port}", reconnect=ONCE) as client,
        make_channel(f"{HOST}:{gateway.port}") as channel,
    ):
        hanging = client.generate("Hi", max_tokens=5)
        await anext(hanging)
        await gateway._end_watch()  # the scripted one says nothing of its health
        await gateway._shown.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        said = aiter(watching)
        while (await anext(said)).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        stopping = asyncio.create_task(gateway.stop(grace_s=60.0))
        assert (await asyncio.wait_for(anext(said), 60)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        async with AsyncClient(f"{HOST}:{gateway.port}", reconnect=ONCE) as late:
            with pytest.raises(UnavailableError):
                await asyncio.wait_for(late.model(), 60)
        assert not stopping.done()
        hanging.cancel()
        await asyncio.wait_for(stopping, 60)  # for a second after the last stream, though a client still watches


async def test_a_deadline_beyond_its_field_is_the_longest(tokenizer: Tokenizer) -> None:
    service = ScriptedOrchestrator()
    async with (
        serving(service) as target,
        gateway_of(target, tokenizer) as gateway,
        make_channel(f"{HOST}:{gateway.port}") as channel,
    ):
        request = pb.GenerateRequest(prompt=b"Hi", sampling=common_pb2.SamplingParams(max_tokens=1))
        call = OrchestratorStub(channel).Generate(request, timeout=60 * 24 * 3600)
        assert [event async for event in call]
    assert service.requests[0].deadline_ms == 2**32 - 1


async def test_model_and_state_are_the_orchestrators(tokenizer: Tokenizer) -> None:
    async with through(ScriptedOrchestrator(), tokenizer) as client:
        model, state, requests = await client.model(), await client.cluster_state(), await client.requests()
    assert (model.name, model.max_tokens) == (MODEL.name, MODEL.max_tokens)
    assert [group.name for group in state.groups] == [group.name for group in STATE.groups]
    assert [each.number for each in requests.requests] == [2, 1]


async def test_without_an_orchestrator_it_does_not_serve(tokenizer: Tokenizer) -> None:
    async with (
        serving(ScriptedOrchestrator()) as target,
        gateway_of(target, tokenizer) as gateway,
        make_channel(f"{HOST}:{gateway.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        async def status() -> int:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
            return int(reply.status)

        # the scripted one says nothing of its health
        await eventually(status, lambda said: said == health_pb2.HealthCheckResponse.NOT_SERVING)


async def test_another_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = pb.Model()
    model.CopyFrom(MODEL)
    model.tokenizer_fingerprint = Tokenizer.load(write_letters(tmp_path)).fingerprint  # it has no chat template
    async with make_channel(f"{HOST}:1") as nobody:
        with pytest.raises(ConfigError, match="another tokenizer or chat template"):
            await GrpcGateway.start(nobody, tokenizer, model, clock=SystemClock(), host=HOST)


async def test_a_gateway_of_nobody_says_so() -> None:
    async with make_channel(f"{HOST}:1") as nobody:
        with pytest.raises(UnavailableError):
            await ask_model(nobody, 60)
