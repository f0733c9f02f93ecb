"""Both clients against a real server with scripted streams: what arrives, what is sent, when the server goes away."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from baton import AsyncClient, Client, Completion, Reconnect, __version__
from baton.calls.cluster_state import ClusterState, GenerationStatus, GroupState, PrefillStatus
from baton.errors import (
    BatonError,
    ChainError,
    DeadlineExceededError,
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.results.completion import ModelInfo, Usage
from baton.results.timings import Timings
from baton.sampling_params import SamplingParams
from baton.types import FinishReason
from baton.v1 import generate_pb2, orchestrator_pb2
from tests.support.clusters.scripted_orchestrator import TAIL, Fault, ScriptedOrchestrator, serving, text_of

pytestmark = pytest.mark.integration

QUICK = Reconnect(num_connects=3, num_resumes=4, first_delay_s=0.001, max_delay_s=0.01)
PATIENT = replace(QUICK, num_resumes=10_000)
LOST = UnavailableError("orchestrator is gone")
FULL = Fault(error=ResourceExhaustedError("queue is full", 0.25), before_started=True)
WAIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How one request went."""

    output: Completion
    error: BatonError | None


Ask = Callable[..., Any]


async def ask_from_a_thread(target: str, *args: Any, reconnect: Reconnect = QUICK, **options: Any) -> Outcome:
    """One request of Client, to its end."""

    def run() -> Outcome:
        with Client(target, reconnect=reconnect) as client:
            stream = client.generate(*args, **options)
            try:
                return Outcome(stream.collect(), None)
            except BatonError as error:
                return Outcome(stream.output, error)

    return await asyncio.wait_for(asyncio.to_thread(run), WAIT_S)


async def ask_on_the_loop(target: str, *args: Any, reconnect: Reconnect = QUICK, **options: Any) -> Outcome:
    """One request of AsyncClient, to its end."""
    async with AsyncClient(target, reconnect=reconnect) as client:
        stream = client.generate(*args, **options)
        try:
            return Outcome(await asyncio.wait_for(stream.collect(), WAIT_S), None)
        except BatonError as error:
            return Outcome(stream.output, error)


@pytest.fixture(params=[ask_from_a_thread, ask_on_the_loop], ids=["threads", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Asks by each kind of client."""
    kind: Ask = request.param
    return kind


async def scripted(ask: Ask, *faults: Fault, **options: Any) -> tuple[Outcome, ScriptedOrchestrator]:
    """One request to a server whose calls suffer these faults, in order."""
    service = ScriptedOrchestrator(faults)
    async with serving(service) as target:
        return await ask(target, "Once", **{"max_tokens": 6, **options}), service


async def test_all_tokens_and_text_arrive(ask: Ask) -> None:
    outcome, _ = await scripted(ask)
    assert outcome.error is None
    assert outcome.output.text == text_of(6)
    assert [token.token_id for token in outcome.output.tokens] == list(range(1000, 1006))


async def test_output_says_what_the_server_said(ask: Ask) -> None:
    output = (await scripted(ask, request_id="mine"))[0].output
    assert (output.request_id, output.model, output.seed, output.exact) == ("mine", "scripted", 77, True)
    assert (output.num_prompt_tokens, output.finish, output.num_resumes) == (5, FinishReason.LENGTH, 0)
    assert output.usage == Usage(num_prompt_tokens=5, num_output_tokens=6, num_attempts=1)
    assert isinstance(output.timings, Timings) and output.timings.time_to_first_token_s == 2.0
    assert output.timings.prefill.ranks[0].num_bytes_pushed == 9


async def test_sampling_priority_and_metadata_are_sent(ask: Ask) -> None:
    options = {"temperature": 0.5, "stop": "\n", "seed": 0, "model": "scripted", "metadata": {"tenant": "a"}}
    _, service = await scripted(ask, **options, priority="batch")
    sent = service.requests[0]
    assert (sent.prompt, sent.sampling.max_tokens, sent.sampling.temperature) == (b"Once", 6, 0.5)
    assert (list(sent.sampling.stop), sent.seeded, sent.model) == (["\n"], True, "scripted")
    assert sent.request_id and not sent.deadline_ms and sent.priority == orchestrator_pb2.PRIORITY_BATCH
    assert service.metadata[0]["tenant"] == "a"


async def test_a_caller_that_traces_sends_its_span(ask: Ask) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("caller") as span:
        context = span.get_span_context()
        _, service = await scripted(ask)
    _, untraced = await scripted(ask)
    assert str(service.metadata[0]["traceparent"]).startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
    assert "traceparent" not in untraced.metadata[0]


async def test_who_asks_is_sent_with_every_attempt() -> None:
    service = ScriptedOrchestrator([Fault(after=2, error=LOST)])
    async with serving(service) as target:
        async with AsyncClient(target, api_key="k-1", tenant="acme", reconnect=QUICK) as client:
            await client.generate("Once", max_tokens=4, metadata={"trace": "t"}).collect()

        def ask() -> None:
            with Client(target, api_key="k-2", reconnect=QUICK) as client:
                client.generate("Once", max_tokens=4).collect()

        await asyncio.to_thread(ask)
    callers = [(sent.get("authorization"), sent.get("baton-tenant"), sent.get("trace")) for sent in service.metadata]
    assert callers == [("Bearer k-1", "acme", "t")] * 2 + [("Bearer k-2", None, None)]


def known(sent: orchestrator_pb2.GenerateRequest) -> list[int]:
    """What the client said that it has."""
    return list(sent.outputs[0].token_ids) if sent.outputs else []


async def test_lost_stream_goes_on_where_it_was(ask: Ask) -> None:
    outcome, service = await scripted(ask, Fault(after=2, error=LOST), Fault(after=3, error=LOST))
    assert outcome.error is None and outcome.output.num_resumes == 2
    assert outcome.output.text == text_of(6)
    assert [token.token_id for token in outcome.output.tokens] == list(range(1000, 1006))
    assert [known(sent) for sent in service.requests] == [[], [1000, 1001], list(range(1000, 1005))]


async def test_resumed_stream_keeps_name_seed_and_model(ask: Ask) -> None:
    _, service = await scripted(ask, Fault(after=2, error=LOST))
    first, second = service.requests
    assert (first.seeded, first.model) == (False, "")
    assert second.request_id == first.request_id
    assert (second.sampling.seed, second.seeded, second.model) == (77, True, "scripted")


SURVIVED = {
    "stream cut before its last message": ([Fault(after=2, end=True)], 1),
    "each new token renews the patience": ([Fault(after=1, error=LOST)] * 8, 8),
    "request is taken at the second attempt": ([Fault(error=LOST, before_started=True)], 0),
    "full queue does not end a running stream": ([Fault(after=2, error=LOST), FULL], 2),
    "token sent twice is shown once": ([Fault(after=4, repeat=2)], 0),
}


@pytest.mark.parametrize("case", SURVIVED)
async def test_stream_comes_whole_through(case: str, ask: Ask) -> None:
    faults, num_resumes = SURVIVED[case]
    outcome, _ = await scripted(ask, *faults, max_tokens=9)
    assert (outcome.error, outcome.output.text, outcome.output.num_resumes) == (None, text_of(9), num_resumes)


async def test_stream_cut_after_its_last_message_is_complete(ask: Ask) -> None:
    cut = Fault(after=6, finish=generate_pb2.FINISH_REASON_STOP, error=LOST)
    outcome, service = await scripted(ask, cut)
    assert (outcome.error, outcome.output.finish) == (None, FinishReason.STOP)
    assert len(service.requests) == 1


async def test_deadline_is_told_though_the_connection_is_lost_behind_it(ask: Ask) -> None:
    cut = Fault(after=3, finish=generate_pb2.FINISH_REASON_DEADLINE, error=LOST)
    outcome, service = await scripted(ask, cut)
    assert isinstance(outcome.error, DeadlineExceededError)
    assert (outcome.output.finish, len(outcome.output.tokens)) == (FinishReason.DEADLINE, 3)
    assert len(service.requests) == 1


async def test_server_that_stays_away_is_given_up(ask: Ask) -> None:
    outcome, service = await scripted(ask, Fault(after=2, error=LOST), *[Fault(error=LOST)] * 9)
    assert type(outcome.error) is UnavailableError and "orchestrator is gone" in str(outcome.error)
    assert len(service.requests) == 1 + QUICK.num_resumes
    assert (len(outcome.output.tokens), outcome.output.finish) == (2, FinishReason.ERROR)


async def test_unreachable_server_is_named(ask: Ask) -> None:
    outcome = await ask("127.0.0.1:1", "Once")
    assert type(outcome.error) is UnavailableError
    assert "127.0.0.1:1 cannot be reached" in str(outcome.error) and "(3 attempts)" in str(outcome.error)


async def test_server_restarted_on_its_port(ask: Ask) -> None:
    first, second = ScriptedOrchestrator([Fault(after=3, hang=True)]), ScriptedOrchestrator()
    async with serving(first) as target:
        asking = asyncio.create_task(ask(target, "Once", max_tokens=6, reconnect=PATIENT))
        await asyncio.wait_for(first.hanging.wait(), WAIT_S)
        port = int(target.rpartition(":")[2])
    async with serving(second, port):
        outcome = await asking
    assert (outcome.error, outcome.output.text) == (None, text_of(6))
    assert known(second.requests[0]) == [1000, 1001, 1002]


async def test_token_left_out_is_an_error(ask: Ask) -> None:
    outcome, _ = await scripted(ask, Fault(after=2, skip=2))
    assert type(outcome.error) is BatonError and "left out output tokens 2 to 3" in str(outcome.error)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(after=2, error=ChainError("three attempts failed")),
        Fault(after=2, error=InvalidArgumentError("prompt is empty")),
        Fault(error=UnauthenticatedError("unknown key"), before_started=True),
    ],
)
async def test_other_errors_are_raised_as_themselves(ask: Ask, fault: Fault) -> None:
    outcome, service = await scripted(ask, fault)
    assert (type(outcome.error), str(outcome.error)) == (type(fault.error), str(fault.error))
    assert len(service.requests) == 1


async def test_full_queue_says_when_to_come_back(ask: Ask) -> None:
    outcome, service = await scripted(ask, FULL)
    assert isinstance(outcome.error, ResourceExhaustedError) and outcome.error.retry_after_s == 0.25
    assert len(service.requests) == 1


async def test_deadline_brings_usage_and_an_error(ask: Ask) -> None:
    passed = Fault(after=2, finish=generate_pb2.FINISH_REASON_DEADLINE, error=DeadlineExceededError("too late"))
    outcome, service = await scripted(ask, passed, deadline_s=30.0)
    assert type(outcome.error) is DeadlineExceededError
    assert outcome.output.finish is FinishReason.DEADLINE and outcome.output.usage is not None
    assert 29_000 < service.requests[0].deadline_ms <= 30_000


async def test_deadline_holds_when_the_server_hangs(ask: Ask) -> None:
    outcome, _ = await scripted(ask, Fault(after=2, hang=True), deadline_s=1.0)
    assert type(outcome.error) is DeadlineExceededError
    assert len(outcome.output.tokens) <= 2 and outcome.output.finish is FinishReason.DEADLINE


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (generate_pb2.FINISH_REASON_CANCELLED, RequestCancelledError),
        (generate_pb2.FINISH_REASON_ERROR, BatonError),
    ],
)
async def test_bad_end_without_a_status_is_an_error(
    ask: Ask, reason: generate_pb2.FinishReason.ValueType, error: type[BatonError]
) -> None:
    outcome, _ = await scripted(ask, Fault(after=2, finish=reason))
    assert type(outcome.error) is error


async def test_events_are_tokens_and_then_the_end() -> None:
    async with serving(ScriptedOrchestrator()) as target, AsyncClient(target) as client:
        events = [event async for event in client.generate("Once", max_tokens=2)]
    assert [(event.index, event.text, event.finish) for event in events] == [
        (0, "0 ", None),
        (1, "1 ", None),
        (2, TAIL, FinishReason.LENGTH),
    ]


async def test_collect_after_some_events_returns_everything() -> None:
    async with serving(ScriptedOrchestrator()) as target, AsyncClient(target) as client:
        stream = client.generate("Once", max_tokens=4)
        assert (await anext(stream)).text == "0 "
        assert (await stream.text(), stream.finish) == (text_of(4), FinishReason.LENGTH)


async def test_chat_and_token_ids_are_sent_as_such() -> None:
    service = ScriptedOrchestrator()
    async with serving(service) as target, AsyncClient(target) as client:
        await client.generate(messages=[{"role": "user", "content": "Hi"}], params=SamplingParams(max_tokens=1)).text()
        await client.generate(token_ids=[5, 6], max_tokens=1).text()
    chat, ids = service.requests
    assert [(message.role, message.content) for message in chat.chat.messages] == [("user", "Hi")]
    assert chat.seeded and not ids.seeded
    assert list(ids.token_ids.ids) == [5, 6]


async def test_many_streams_share_a_client() -> None:
    service = ScriptedOrchestrator()

    def ask_many(target: str) -> list[str]:
        with Client(target) as client:
            streams = [client.generate("Once", max_tokens=count) for count in range(1, 33)]
            return [stream.text() for stream in streams]

    async with serving(service) as target, AsyncClient(target) as client:
        texts = await asyncio.gather(*(client.generate("Once", max_tokens=n).text() for n in range(1, 65)))
        assert texts == [text_of(n) for n in range(1, 65)]
        assert await asyncio.to_thread(ask_many, target) == [text_of(n) for n in range(1, 33)]


async def test_model_and_cluster_state() -> None:
    model = ModelInfo("scripted", 4096, 2000, "float32", True, "f")
    holds = GenerationStatus(num_slots=8, num_free=7)
    group = GroupState("g0", "generate", ("h:1",), 0, True, 0, 0, generation=holds)
    ranks = {1: PrefillStatus(epoch=3, num_jobs=2)}
    chain = GroupState("p0", "prefill", ("h:2", "h:3"), 3, False, 0, 0, ranks=ranks)
    state = ClusterState((group, chain), num_queued=2, num_running=1, num_degraded=4, version=__version__)

    def ask_both(target: str) -> tuple[ModelInfo, ClusterState]:
        with Client(target) as client:
            return client.model(), client.cluster_state()

    async with serving(ScriptedOrchestrator()) as target, AsyncClient(target) as client:
        assert (await client.model(), await client.cluster_state()) == (model, state)
        assert await asyncio.to_thread(ask_both, target) == (model, state)


async def test_model_of_a_server_that_is_away() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            await client.model()
