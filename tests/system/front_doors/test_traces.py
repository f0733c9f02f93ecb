"""One trace of one request, from OpenAI's client to the ranks, as a collector receives it from the HTTP gateway and the
orchestrator."""

import asyncio
from dataclasses import replace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton.process.tracing import provider_of
from baton.settings.tracing import TraceExport
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import HASTY, cluster
from tests.support.models.tiny_tokenizer import letter_tokenizer
from tests.support.wire.collector import collector, values
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = {"queue", "placement", "prefill", "transfer", "insert", "decode", "prefill_rank", "transfer_rank"}


def holds(outer: Span, inner: Span) -> bool:
    """Whether a span lasts from before another to behind it."""
    return (
        outer.start_time_unix_nano <= inner.start_time_unix_nano <= inner.end_time_unix_nano <= outer.end_time_unix_nano
    )


async def test_a_request_over_http_is_one_trace_down_to_the_ranks() -> None:
    async with collector() as found:
        config = replace(HASTY, otlp_endpoint=found.endpoint)
        spans = provider_of(TraceExport(found.endpoint), {})
        assert spans is not None
        async with (
            cluster(config=config) as made,
            http_gateway(f"{HOST}:{made.server.port}", letter_tokenizer(), spans=spans) as http,
        ):
            headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
            stream = await http.openai.completions.create(
                model="letters", prompt="Once upon a time", max_tokens=6, stream=True, extra_headers=headers
            )
            assert [chunk async for chunk in stream]
            await made.until_empty()
        await asyncio.to_thread(spans.shutdown)
    assert {span.trace_id.hex() for span in found.spans} == {TRACE_ID}
    (over_http,) = [span for span in found.spans if span.parent_span_id.hex() == SPAN_ID]
    assert over_http.name.startswith("POST") and "/v1/completions" in str(values(over_http.attributes))
    (root,) = found.named("generate")
    assert root.parent_span_id == over_http.span_id and holds(over_http, root)
    below = [span for span in found.spans if span.parent_span_id == root.span_id]
    assert {span.name for span in below} == STAGES and all(holds(root, span) for span in below)


async def test_what_is_asked_by_monitors_is_in_no_trace() -> None:
    async with collector() as found:
        spans = provider_of(TraceExport(found.endpoint), {})
        async with (
            cluster() as made,
            http_gateway(f"{HOST}:{made.server.port}", letter_tokenizer(), spans=spans) as http,
        ):
            for path in ("/health", "/ready", "/metrics"):
                assert (await http.openai._client.get(f"{http.url}{path}")).status_code == 200
        assert spans is not None
        await asyncio.to_thread(spans.shutdown)
    assert not found.spans
