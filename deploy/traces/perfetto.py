"""Writes the stages of a request in the Trace Event Format, which Perfetto and Chrome can display. The functions have
no side effects.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. An event of type "X" is a span,
"i" is an instant, and "M" gives a line of the display its name. Times are in microseconds since the request's arrival.
"""

import json
from collections.abc import Iterator
from typing import Any

from baton.results.prefill_trace import Interval
from baton.results.stages import Stage
from orchestrator.observability.stages import Trace

_PROCESS = 1
_REQUEST_THREAD = 1
_THREADS_OF_RANK = 2
"""Number of lines in the display for each rank: one for its computation, and one for its transfers of KV to the
generation group."""


def perfetto_json(trace: Trace) -> str:
    """Return a request's trace as the text of a JSON file. The display has one line for the request's stages. It also
    has two lines for each rank: one for its layers, and one for its transfers of KV to the generation group."""
    events = [*_names(trace), *_stages(trace), *_layers(trace), *_failures(trace)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the names and the order of the lines."""
    rows = {_REQUEST_THREAD: "request"}
    for each in trace.timings.prefill.ranks:
        computes = _thread(each.rank)
        rows |= {computes: f"rank {each.rank}", computes + 1: f"rank {each.rank}, pushed"}
    error = f", {trace.error}" if trace.error else ""
    yield _meta("process_name", 0, {"name": f"request {trace.request_id}{error}"})
    for thread, name in rows.items():
        yield _meta("thread_name", thread, {"name": name})
        yield _meta("thread_sort_index", thread, {"sort_index": thread})


def _meta(name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": thread, "args": args}


def _stages(trace: Trace) -> Iterator[dict[str, Any]]:
    for stage in trace.stages():
        yield _span(trace, stage.name, stage.at, _thread_of(stage), dict(stage.attributes))


def _layers(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the layers of each rank, inside the span of its computation."""
    for each in trace.timings.prefill.ranks:
        for number, layer in enumerate(each.layers):
            yield _span(trace, f"layer {number}", layer, _thread(each.rank), {})


def _failures(trace: Trace) -> Iterator[dict[str, Any]]:
    for failure in trace.failures:
        at = Interval(failure.unix_ns, failure.unix_ns)
        args = {"attempt": failure.number, "error": failure.error, "reason": failure.reason}
        event = _span(trace, "attempt failed", at, _REQUEST_THREAD, args)
        del event["dur"]
        yield event | {"ph": "i", "s": "p"}


def _span(trace: Trace, name: str, at: Interval, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    since_ns = at.start_ns - trace.timings.received_ns
    times = {"ts": since_ns / 1000, "dur": (at.end_ns - at.start_ns) / 1000}
    return {"ph": "X", "name": name, "pid": _PROCESS, "tid": thread, **times, "args": args}


def _thread_of(stage: Stage) -> int:
    if stage.rank is None:
        return _REQUEST_THREAD
    return _thread(stage.rank) + (stage.name == "transfer_rank")


def _thread(rank: int) -> int:
    """Return the number of the line that shows a rank's computation. The next line shows its pushes."""
    return _REQUEST_THREAD + 1 + _THREADS_OF_RANK * rank
