"""Exports ended requests as OpenTelemetry spans. Imported only if a collector is configured."""

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.results.stages import Attributes
from orchestrator.observability.stages import Trace
from orchestrator.requests.request import Request


def export(tracer: Tracer, trace: Trace, request: Request) -> None:
    """Export one request as OpenTelemetry spans: a span for the request, and a child span for each of its stages."""
    timings, usage = trace.timings, trace.usage
    root = tracer.start_span(
        "generate",
        context=TraceContextTextMapPropagator().extract(dict(request.trace_context)),
        kind=SpanKind.SERVER,
        start_time=timings.received_ns,
        attributes={
            "baton.request_id": trace.request_id,
            "baton.tenant": request.tenant.name,
            "baton.priority": request.priority.value,
            "baton.attempts": usage.num_attempts,
            "baton.cached_tokens": usage.num_cached_tokens,
            "gen_ai.request.max_tokens": request.params.max_tokens,
            "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.output_tokens": usage.num_output_tokens,
            "gen_ai.response.finish_reasons": tuple(reason.value for reason in trace.reasons),
        },
    )
    for failure in trace.failures:
        known: Attributes = {
            "baton.attempt": failure.number,
            "error.type": failure.error,
            "exception.message": failure.reason,
        }
        root.add_event("attempt failed", known, failure.unix_ns)
    if trace.error:
        root.set_attribute("error.type", trace.error)
        root.set_status(Status(StatusCode.ERROR, trace.error))
    _export_stages(tracer, root, trace)
    root.end(max(timings.received_ns, timings.finished_ns))


def _export_stages(tracer: Tracer, root: Span, trace: Trace) -> None:
    below = set_span_in_context(root)
    for stage in trace.stages():
        attributes = dict(stage.attributes)
        if stage.rank is not None:
            attributes["baton.rank"] = stage.rank
        span = tracer.start_span(stage.name, context=below, start_time=stage.at.start_ns, attributes=attributes)
        span.end(stage.at.end_ns)
