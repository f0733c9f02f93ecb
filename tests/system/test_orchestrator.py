"""An orchestrator with real workers: equal tokens, full load, clients that cancel, deadlines, requests with false
claims."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.errors import BatonError, DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from baton.proto_types import params_to_proto
from baton.sampling_params import SamplingParams
from baton.transport.channel import make_channel
from baton.transport.kv_sink import ReserveSpec
from baton.transport.status_interceptor import from_rpc_error
from baton.types import RequestId, TokenRange
from baton.v1 import common_pb2, generate_pb2
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from generate_workers.slots.leases import SlotState
from orchestrator.membership.view import ClusterView
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.clients import HOST, Answer
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.engines.generation import prompt, reference_ids
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import ids_of, text_of

pytestmark = pytest.mark.integration

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=7, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
FIRST_CALLS = 4
"""Of attention: a token comes, and not all 300."""


@pytest.fixture
async def running() -> AsyncIterator[BareCluster]:
    async with cluster() as made:
        yield made


async def test_a_prompt_goes_through_chain_and_slot_to_the_client(running: BareCluster) -> None:
    request = running.request(prompt(40), GREEDY)
    answer = await running.ask(request)
    assert answer.token_ids == reference_ids(running.decoder, prompt(40), GREEDY)
    assert (answer.text, answer.indices) == (text_of(answer.token_ids), list(range(12)))
    assert (answer.started.request_id, answer.started.num_prompt_tokens) == (request.request_id, 40)
    assert answer.finished is not None
    assert answer.finishes[0] == generate_pb2.FINISH_REASON_LENGTH
    usage = answer.finished.usage
    assert (usage.num_prompt_tokens, usage.num_output_tokens, usage.num_attempts) == (40, 12, 1)


async def test_timings_follow_each_other_and_name_each_rank_s_part(running: BareCluster) -> None:
    answer = await running.ask(running.request(prompt(40), GREEDY))
    assert answer.finished is not None
    times = answer.finished.timings
    stages = [times.received_ns, times.admitted_ns, times.leased_ns, times.first_token_ns, times.finished_ns]
    assert stages == sorted(stages)
    assert stages[0] > 0
    parts = [(rank.rank, TokenRange(rank.tokens.start, rank.tokens.end)) for rank in times.prefill.ranks]
    assert parts == [(0, TokenRange(0, 20)), (1, TokenRange(20, 40))]
    assert all(rank.start_ns < rank.end_ns and len(rank.layers) == 2 for rank in times.prefill.ranks)


async def test_sixteen_at_once_equal_one_process(running: BareCluster) -> None:
    asked = [(prompt(5 + 17 * n), replace(SAMPLED, seed=n)) for n in range(16)]
    answers = await asyncio.gather(*(running.ask(running.request(ids, params)) for ids, params in asked))
    for (ids, params), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == reference_ids(running.decoder, ids, params)


async def test_sixty_four_mixed_streams_complete(running: BareCluster) -> None:
    rng = random.Random(3)
    asked = [
        running.request(prompt(rng.randint(1, 200), n), replace(GREEDY, max_tokens=rng.randint(1, 60)))
        for n in range(64)
    ]
    answers = await asyncio.gather(*(running.ask(request, timeout_s=None) for request in asked))
    for request, answer in zip(asked, answers, strict=True):
        assert answer.indices == list(range(request.sampling.max_tokens))


async def test_the_seed_that_the_server_draws_gives_the_same_tokens_again(running: BareCluster) -> None:
    unseeded = running.request(prompt(9), replace(SAMPLED, seed=0))
    unseeded.seeded = False
    first = await running.ask(unseeded)
    again = await running.ask(running.request(prompt(9), replace(SAMPLED, seed=first.started.seed)))
    assert again.token_ids == first.token_ids


async def test_text_is_tokenized(running: BareCluster) -> None:
    answer = await running.ask(pb.GenerateRequest(prompt=b"Hello there", sampling=params_to_proto(GREEDY)))
    assert answer.token_ids == reference_ids(running.decoder, ids_of("Hello there"), GREEDY)
    assert answer.started.request_id


def having(output_ids: Sequence[int]) -> list[common_pb2.Output]:
    """What a client of one choice says that it has."""
    return [common_pb2.Output(token_ids=output_ids)]


async def test_a_client_resumes_a_stream_after_the_tokens_it_has(running: BareCluster) -> None:
    whole = await running.ask(running.request(prompt(30), SAMPLED))
    rest = await running.ask(running.request(prompt(30), SAMPLED, outputs=having(whole.token_ids[:5])))
    assert (rest.token_ids, rest.indices) == (whole.token_ids[5:], list(range(5, 12)))
    assert whole.text == text_of(whole.token_ids[:5]) + rest.text


async def test_a_client_that_lost_only_the_end_gets_it(running: BareCluster) -> None:
    whole = await running.ask(running.request(prompt(30), SAMPLED))
    rest = await running.ask(running.request(prompt(30), SAMPLED, outputs=having(whole.token_ids)))
    assert rest.token_ids == []
    assert rest.finished is not None
    assert rest.finishes[0] == generate_pb2.FINISH_REASON_LENGTH


# Clients that leave.


async def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    async with cluster(num_slots=1) as made:
        made.group_gates[0].shut(num_passes=FIRST_CALLS)
        call = made.open(made.request(prompt(10), LONG))
        await Answer().read(call, 1)
        queued = made.open(made.request(prompt(11), GREEDY))
        await eventually(made.state, lambda state: state.num_queued == 1)
        queued.cancel()
        await eventually(made.state, lambda state: state.num_queued == 0)
        made.group_gates[0].open()
        call.cancel()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_client_that_leaves_during_prefill_frees_all(running: BareCluster, rank: int) -> None:
    running.rank_gates[rank].shut()
    call = running.open(running.request(prompt(40), GREEDY))
    await running.rank_gates[rank].until_reached()
    call.cancel()
    running.rank_gates[rank].open()
    await running.until_empty()


async def test_a_client_that_leaves_between_commit_and_first_token_frees_its_slot(running: BareCluster) -> None:
    gate, slots = running.group_gates[0], running.groups[0].slots
    gate.shut(num_passes=FIRST_CALLS)
    other = running.open(running.request(prompt(10), LONG))
    await Answer().read(other, 1)
    await gate.until_reached()  # the engine is in a step: nobody joins the batch
    call = running.open(running.request(prompt(40), GREEDY))

    async def num_committed() -> int:
        return [slot.state for slot in slots._slots].count(SlotState.COMMITTED)

    await eventually(num_committed, lambda number: number == 1)
    call.cancel()
    gate.open()
    other.cancel()
    await running.until_empty()


async def test_a_client_that_leaves_mid_stream_frees_its_slot(running: BareCluster) -> None:
    call = running.open(running.request(prompt(40), LONG))
    await Answer().read(call, 3)
    call.cancel()
    await running.until_empty()


async def test_a_client_whose_connection_breaks_frees_its_slot(running: BareCluster) -> None:
    async with make_channel(f"{HOST}:{running.server.port}") as channel:
        call = OrchestratorStub(channel).Generate(running.request(prompt(40), LONG))
        await Answer().read(call, 3)
    await running.until_empty()


async def test_clients_that_leave_at_any_moment_leave_nothing(running: BareCluster) -> None:
    rng = random.Random(11)

    async def ask_and_leave(index: int) -> bool:
        request = running.request(prompt(rng.randint(1, 200), index), replace(GREEDY, max_tokens=30))
        try:
            await asyncio.wait_for(running.ask(request), rng.uniform(0, 0.5))
        except TimeoutError:
            return True
        return False

    left = await asyncio.gather(*(ask_and_leave(index) for index in range(60)))
    assert any(left)
    await running.until_empty()


# Bounds.


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async with cluster(num_slots=1, config=OrchestratorConfig(max_queued_requests=1)) as made:
        made.group_gates[0].shut(num_passes=FIRST_CALLS)
        calls = [made.open(made.request(prompt(10), LONG))]
        await Answer().read(calls[0], 1)
        calls.append(made.open(made.request(prompt(10), LONG)))
        await eventually(made.state, lambda state: state.num_queued == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.open(made.request(prompt(10), GREEDY)).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]
        assert isinstance(details, bytes)
        retry = error_details_pb2.RetryInfo()
        assert status_pb2.Status.FromString(details).details[0].Unpack(retry)
        assert retry.retry_delay.ToNanoseconds() > 0
        error = from_rpc_error(caught.value)
        assert isinstance(error, ResourceExhaustedError)
        made.group_gates[0].open()
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("whose", ["request", "call"])
async def test_a_deadline_ends_the_stream_with_its_usage(running: BareCluster, whose: str) -> None:
    await running.ask(running.request(prompt(20), GREEDY))  # what is made at first use
    answer = Answer()
    for _ in range(3):  # a call ends 0.1 s after its request, whatever has come by then; a chain may be held up as long
        running.group_gates[0].shut()
        request = running.request(prompt(20), LONG, deadline_ms=3000 if whose == "request" else 0)
        call, answer = running.open(request, 3 if whose == "call" else 60), Answer()
        with pytest.raises(DeadlineExceededError):
            await answer.drain(call)
        running.group_gates[0].open()
        await running.until_empty()
        if answer.finished is not None and answer.token_ids:
            break
    assert answer.finished is not None
    assert answer.finishes[0] == generate_pb2.FINISH_REASON_DEADLINE
    assert answer.finished.usage.num_output_tokens == len(answer.token_ids) == 1


async def test_a_deadline_passes_in_the_queue() -> None:
    async with cluster(num_slots=1) as made:
        call = made.open(made.request(prompt(10), LONG))
        await Answer().read(call, 1)
        made.group_gates[0].shut()
        with pytest.raises(DeadlineExceededError):
            await made.ask(made.request(prompt(10), GREEDY, deadline_ms=100))
        assert (await made.state()).num_queued == 0
        made.group_gates[0].open()
        call.cancel()


def asking(
    token_ids: tuple[int, ...] = (1, 2), output_ids: tuple[int, ...] = (), **sampling: Any
) -> pb.GenerateRequest:
    """A request for token ids whose sampling nobody has checked."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        outputs=having(output_ids) if output_ids else [],
        sampling=unchecked(**sampling),
    )


def unchecked(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"max_tokens": 4, **fields})


def saying(prompt: bytes) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=prompt, sampling=unchecked())


CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
LONG_CHAT = pb.Chat(messages=[*CHAT.messages] * 401)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (pb.GenerateRequest(sampling=unchecked()), "input is not set"),
        (saying(b""), "prompt is empty"),
        (asking(()), "token_ids is empty"),
        (saying(b"a" * (9 * 2**20)), "prompt has 9437184 bytes: the limit is 8388608"),
        (saying(b"a" * 400), "prompt has 400 tokens: the model takes at most 399"),
        (saying(b"ab\xff"), "prompt is not UTF-8 at byte 2"),
        (pb.GenerateRequest(chat=CHAT, sampling=unchecked()), "messages: .* no chat template"),
        (pb.GenerateRequest(chat=LONG_CHAT, sampling=unchecked()), "chat has 401 messages: the model's limit is 400"),
        (asking((97,)), "token_ids holds 97: .* end at 96"),
        (pb.GenerateRequest(prompt=b"a", model="gpt-2"), "model = 'gpt-2' is unknown: 'letters'"),
        (pb.GenerateRequest(prompt=b"a", request_id="a\nb"), "request_id = .* at most 128 printable"),
        (asking(max_tokens=0), r"sampling\.max_tokens = 0 is out of range: use at least 1"),
        (asking(max_tokens=399), r"sampling\.max_tokens = 399 .* room for 398.* limit is 400"),
        (asking(temperature=-1), r"sampling\.temperature = -1.0 is out of range: use 0"),
        (asking(min_tokens=5), r"sampling\.min_tokens = 5 .* sampling\.max_tokens is 4"),
        (asking(logit_bias={97: 1.0}), r"sampling\.logit_bias holds 97: .* end at 96"),
        (asking(stop_token_ids=[200]), r"sampling\.stop_token_ids holds 200"),
        (asking(output_ids=(1, 2), temperature=1.0), "outputs without seeded"),
        (asking(output_ids=(1, 2, 3, 4, 5)), r"outputs holds 5 tokens: sampling\.max_tokens is 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_request_is_refused_by_name_and_limit(
    running: BareCluster, bad: pb.GenerateRequest, text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        await running.ask(bad)
    assert len((await running.ask(running.request(prompt(5), GREEDY))).token_ids) == 12


async def test_a_stop_token_id_may_be_named_again(running: BareCluster) -> None:
    (first, *_) = reference_ids(running.decoder, (1, 2), GREEDY)
    assert (await running.ask(asking(stop_token_ids=[first, first]))).token_ids == [first]


async def test_a_message_of_17_mib_is_refused(running: BareCluster) -> None:
    with pytest.raises(BatonError, match="17825.* vs. 16777216"):
        await running.ask(pb.GenerateRequest(prompt=b"a" * (17 * 2**20)))
    assert len((await running.ask(running.request(prompt(5), GREEDY))).token_ids) == 12


# What the orchestrator says of itself.


async def test_the_model_and_its_limits_are_told(running: BareCluster) -> None:
    model = await running.stub.GetModel(pb.GetModelRequest())
    assert (model.name, model.max_tokens, model.vocab_size, model.dtype) == ("letters", 400, 97, "float32")
    assert model.layout_fingerprint == running.decoder.layout.fingerprint


async def test_health_follows_the_generation_groups(running: BareCluster) -> None:
    stub = health_pb2_grpc.HealthStub(running.channel)

    async def status() -> int:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service="baton.v1.Orchestrator"))
        return int(reply.status)

    await eventually(status, lambda value: value == health_pb2.HealthCheckResponse.SERVING)
    running.members.update(ClusterView())
    await eventually(status, lambda value: value == health_pb2.HealthCheckResponse.NOT_SERVING)
    running.members.update(running.view())


async def test_reflection_names_the_services(running: BareCluster) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([asked]))
    named = {service.name for service in (await call.read()).list_services_response.service}
    await call.read()  # the end
    assert {"baton.v1.Orchestrator", "grpc.health.v1.Health"} <= named


async def test_a_lease_of_no_request_is_counted_as_leaked_when_it_has_outlived_its_ttl() -> None:
    async with cluster(config=OrchestratorConfig(lease_ttl_s=1.0)) as made:
        slots = made.groups[0].slots
        lease = slots.reserve(ReserveSpec(RequestId("stranger"), 1, 10, 20, 60))

        async def num_leaked() -> int:
            return sum(group.num_leaked for group in (await made.state()).groups)

        assert await num_leaked() == 0
        await eventually(num_leaked, lambda number: number == 1)
        slots.abort(lease.ref)
        await eventually(num_leaked, lambda number: number == 0)
