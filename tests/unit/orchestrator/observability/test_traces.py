"""Spans of real requests, as a collector gets them; and what operators are told of requests that have ended."""

import asyncio
import logging
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from baton.errors import BatonError, ConfigError, NotFoundError
from baton.process.request_log import SERVED_REQUEST
from baton.results.completion import Usage
from baton.results.prefill_trace import Interval
from baton.results.timings import Timings
from baton.rpc_status import translate_rpc_errors
from baton.sampling_params import SamplingParams
from baton.types import FinishReason
from baton.v1 import admin_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from deploy.config.file import WrittenConfig
from orchestrator.api.admin import trace_from_proto, trace_to_proto
from orchestrator.observability.stages import Trace
from orchestrator.observability.traces import NUM_KEPT, Traces
from orchestrator.requests.record import FailedAttempt
from orchestrator.requests.request import Request
from orchestrator.requests.tenants import Tenant
from tests.support.clusters.cluster import HASTY, BareCluster, cluster
from tests.support.engines.generation import prompt
from tests.support.eventually import eventually
from tests.support.wire.collector import Collector, collector, values

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED, UNTRACED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"
TO_FIRST = ["queue", "placement", "prefill", "transfer", "insert"]


def interval(span: Span) -> Interval:
    return Interval(span.start_time_unix_nano, span.end_time_unix_nano)


async def ask(made: BareCluster, num_tokens: int, traceparent: str = "", params: SamplingParams = PARAMS) -> None:
    """A request to its end, from a caller with a trace of its own or without."""
    metadata = (("traceparent", traceparent),) if traceparent else ()
    with translate_rpc_errors():
        async for _ in made.stub.Generate(made.request(prompt(num_tokens), params), timeout=60, metadata=metadata):
            pass


def stages_of(found: Collector, root: Span) -> dict[str, Span]:
    """The spans of a request's stages, ranks' apart."""
    below = [span for span in found.spans if span.parent_span_id == root.span_id]
    return {span.name: span for span in below if not span.name.endswith("_rank")}


async def test_a_chain_s_request_is_one_trace_with_every_stage() -> None:
    async with collector() as found:
        async with cluster(config=replace(HASTY, otlp_endpoint=found.endpoint)) as made:
            await ask(made, 40, TRACED)
        (root,) = found.named("generate")
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
        assert {span.trace_id.hex() for span in found.spans} == {TRACE_ID}
        known = values(root.attributes)
        assert (known["gen_ai.usage.input_tokens"], known["gen_ai.usage.output_tokens"]) == (40, 6)
        assert found.resources[0]["service.name"] == "baton"
        stages = stages_of(found, root)
        assert list(stages) == [*TO_FIRST, "decode"]
        times = [interval(span) for span in stages.values()]
        assert all(before.end_ns == after.start_ns for before, after in pairwise(times)), "no gap, no overlap"
        assert times[0].start_ns == root.start_time_unix_nano and times[-1].end_ns == root.end_time_unix_nano
        for name in ("prefill_rank", "transfer_rank"):
            ranks = found.named(name)
            assert [values(span.attributes)["baton.rank"] for span in ranks] == [0, 1]
            for span in ranks:
                at = interval(span)
                assert root.start_time_unix_nano <= at.start_ns < at.end_ns <= root.end_time_unix_nano
        chunks = [values(span.attributes)["baton.tokens"] for span in found.named("prefill_rank")]
        assert sum(chunks) == 40


@pytest.mark.parametrize(("share", "traced"), [(0.0, []), (1.0, [11, 12])])
async def test_a_caller_may_trace_less_than_the_share_and_not_more(share: float, traced: list[int]) -> None:
    async with collector() as found:
        async with cluster(config=replace(HASTY, otlp_endpoint=found.endpoint, trace_share=share)) as made:
            await ask(made, 10, UNTRACED)
            await ask(made, 11)
            await ask(made, 12, TRACED)
        assert [values(span.attributes)["gen_ai.usage.input_tokens"] for span in found.named("generate")] == traced


async def test_a_request_that_fails_says_which_attempts_did() -> None:
    async with collector() as found:
        async with cluster(config=replace(HASTY, otlp_endpoint=found.endpoint, max_attempts=2)) as made:
            await made.ranks[0].stop()
            with pytest.raises(BatonError):
                await ask(made, 40)
        (root,) = found.named("generate")
        assert root.status.code == Status.STATUS_CODE_ERROR
        attempts = [values(event.attributes) for event in root.events]
        assert [each["baton.attempt"] for each in attempts] == [1, 2]
        assert values(root.attributes)["error.type"] == attempts[-1]["error.type"]
        assert next(iter(stages_of(found, root))) == "queue"


@pytest.mark.ci
async def test_a_collector_that_is_away_changes_nothing_for_requests() -> None:
    async with cluster(config=replace(HASTY, otlp_endpoint="http://127.0.0.1:9")) as made:
        await asyncio.gather(*(ask(made, num_tokens) for num_tokens in (10, 20, 30)))


async def test_operators_are_told_of_a_request_that_has_ended() -> None:
    async with cluster() as made:
        request = made.request(prompt(40), PARAMS)
        admin = AdminStub(made.channel)

        async def told() -> Trace:
            with translate_rpc_errors():
                answer = await admin.GetTrace(admin_pb2.GetTraceRequest(request_id=request.request_id), timeout=60)
            return trace_from_proto(answer)

        with pytest.raises(NotFoundError, match="not among the latest"):
            await told()
        answer = await made.ask(request)
        trace = await eventually(told, lambda found: bool(found.request_id))
    assert (trace.request_id, trace.reasons) == (request.request_id, (FinishReason.LENGTH,))
    assert trace.timings.finished_ns == answer.end.timings.finished_ns
    assert [stage.name for stage in trace.stages() if stage.rank is None] == [*TO_FIRST, "decode"]


def ended(timings: Timings, request_id: str = "r", failures: tuple[FailedAttempt, ...] = ()) -> Trace:
    return Trace(request_id, Usage(5, 2, 1), timings, (FinishReason.ERROR,), "UnavailableError", failures)


@pytest.mark.parametrize(
    ("marks", "stages"),
    [
        ((100, 0, 0, 0, 150), {"queue": (100, 150)}),
        ((100, 120, 0, 0, 150), {"queue": (100, 120), "placement": (120, 150)}),
        ((100, 120, 130, 0, 150), {"queue": (100, 120), "placement": (120, 130), "prefill": (130, 150)}),
        ((100, 120, 140, 130, 150), {"queue": (100, 120), "placement": (120, 130), "decode": (130, 150)}),
    ],
    ids=["never admitted", "never placed", "no token", "an earlier attempt's token"],
)
def test_stages_end_where_the_request_did(
    marks: tuple[int, int, int, int, int], stages: dict[str, tuple[int, int]]
) -> None:
    found = {stage.name: (stage.at.start_ns, stage.at.end_ns) for stage in ended(Timings(*marks)).stages()}
    assert found == stages


def test_what_is_known_survives_the_wire() -> None:
    trace = ended(Timings(1, 2, 3, 4, 5, "host"), failures=(FailedAttempt(1, 7, "LeaseError", "gone"),))
    assert trace_from_proto(trace_to_proto(trace)) == trace


def test_only_the_latest_are_kept() -> None:
    traces, request = Traces(), Request("r", (1,), PARAMS)  # type: ignore[arg-type]
    for number in range(NUM_KEPT + 1):
        traces.ended(ended(Timings(1, 2, 3, 4, 5), str(number)), request)
    assert traces.get("0") is None and traces.get("1") is not None and traces.get(str(NUM_KEPT)) is not None


def test_a_tenant_does_not_replace_the_request_of_another_by_its_id() -> None:
    traces, request = Traces(), Request("r", (1,), PARAMS)  # type: ignore[arg-type]
    first, second = ended(Timings(1, 2, 3, 4, 5)), ended(Timings(6, 7, 8, 9, 10))
    traces.ended(first, replace(request, tenant=Tenant("a")))
    traces.ended(second, replace(request, tenant=Tenant("b")))
    assert traces.get("r") is first
    traces.ended(second, replace(request, tenant=Tenant("a")))  # its own, as when it was resumed
    assert traces.get("r") is second


def test_a_collector_s_address_is_a_url() -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint.*begin it with http://"):
        _ = WrittenConfig({"orchestrator": {"otlp_endpoint": "127.0.0.1:4317"}}).config


async def test_every_line_about_a_request_is_logged_in_its_context(caplog: pytest.LogCaptureFixture) -> None:
    served: list[tuple[str, str]] = []

    def note(record: logging.LogRecord) -> bool:
        if found := re.search(r"request=(\w+)", record.getMessage()):
            served.append((found[1], SERVED_REQUEST.get()))
        return True

    caplog.handler.addFilter(note)
    with caplog.at_level(logging.INFO):
        async with cluster(config=HASTY) as made:
            requests = [made.request(prompt(num_tokens), replace(PARAMS, n=n)) for num_tokens, n in ((20, 1), (30, 2))]
            await asyncio.gather(*(made.ask(request) for request in requests))
    assert {named for named, _ in served} == {request.request_id for request in requests}
    assert all(named == known for named, known in served) and len(served) >= 6
