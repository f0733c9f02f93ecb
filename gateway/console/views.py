"""Makes the console's view of a cluster as JSON: groups of workers with their KV by storage tier, and requests with
their stages. Also makes the events of the playground's stream. A token's event names the groups that computed the token
(its origin) only if they differ from the previous token's. A step's last event reports which of its tokens were drafts.
The functions have no side effects.

All times are in milliseconds. The stages of a request have times since the request's arrival. All other points in time
are times since 1970 (UTC).
"""

from collections.abc import Iterator
from dataclasses import asdict, replace

from baton.calls.cluster_state import ClusterState, GenerationStatus, GroupState, PrefillStatus
from baton.errors import InvalidArgumentError
from baton.results.completion import Completion, ModelInfo
from baton.results.prefill_trace import PlacementTerms
from baton.results.request_list import RequestList, RequestStatus
from baton.results.stages import stages_of
from baton.results.timings import Timings
from baton.types import TokenEvent
from gateway.answers import Object
from gateway.reading import Asked

_STORE = (
    "identity", "num_blocks", "num_bytes", "limit_bytes", "num_bytes_read", "num_bytes_stored", "num_disk_bytes_read",
    "num_bytes_fetched", "num_bytes_sent", "num_disk_bytes", "limit_disk_bytes",
)  # fmt: skip
_SLOTS = ("num_slots", "num_free", "num_leased", "num_active", "num_quarantined")
_KV = ("num_bytes", "num_bytes_free", "num_bytes_leased", "num_bytes_active", "num_bytes_quarantined")


def snapshot(state: ClusterState, requests: RequestList, model: ModelInfo, *, has_chats: bool) -> Object:
    """Return the state that the console shows: the cluster, its requests and the served model. `has_chats` is true if
    the model has a chat template."""
    return {
        "now_ms": requests.now_ns / 1e6,
        "version": state.version,
        "model": {
            "name": model.name,
            "max_tokens": model.max_tokens,
            "has_chats": has_chats,
        },
        "num_queued": state.num_queued,
        "num_queued_tokens": state.num_queued_tokens,
        "num_running": state.num_running,
        "num_degraded": state.num_degraded,
        "why_not_serving": state.why_not_serving,
        "why_degraded": state.why_degraded,
        "groups_away": state.groups_away,
        "scaling": "" if state.scaling is None else f"{state.scaling.mode}: {state.scaling.explanation}",
        "groups": [_group(group) for group in state.groups],
        "requests": [_request(each, requests.now_ns) for each in requests.requests],
    }


def taken(timings: Timings) -> Object:
    """Return the predicted and the measured times of a request until its first token, in milliseconds."""
    placement, width = timings.prefill.placement, timings.prefill.width
    terms = None if placement is None else placement.local if placement.is_local else placement.chain
    leased, first = timings.leased_ns, timings.first_token_ns
    return {
        "reason": "" if placement is None else placement.reason,
        "is_local": placement is not None and placement.is_local,
        "predicted": None if terms is None else _terms(terms),
        "took_ms": _ms(first - leased) if leased and first >= leased else None,
        "width": "" if width is None else width.reason,
        "fetch": "" if timings.prefill.fetch is None else timings.prefill.fetch.text,
        "speculation": None if timings.speculation is None else asdict(timings.speculation),
        "residency": timings.residency,
    }


def _terms(terms: PlacementTerms) -> Object:
    parts = {name.removesuffix("_s"): round(value * 1e3, 3) for name, value in asdict(terms).items()}
    own = sum(value for name, value in parts.items() if name != "others")
    return {"parts": parts, "own_ms": round(own, 3)}


def _group(group: GroupState) -> Object:
    held = group.generation
    store = group.prefix_store
    return {
        "name": group.name,
        "role": group.role,
        "readiness": group.readiness,
        "lender": group.lender,
        "epoch": group.epoch,
        "num_requests": group.num_requests,
        "num_leaked": group.num_leaked,
        "imbalance": group.imbalance,
        "endpoints": group.endpoints,
        "is_silent": group.role == "generate" and held is None,
        "generation": None if held is None else _generation(held),
        "ranks": [_rank(rank, group.ranks.get(rank)) for rank in range(len(group.endpoints))],
        "store": None if store is None else {name: getattr(store, name) for name in _STORE},
    }


def _generation(held: GenerationStatus) -> Object:
    return {
        "slots": {name: getattr(held, name) for name in _SLOTS},
        "kv": {name: getattr(held.kv, name) for name in _KV},
        "num_bytes_held": held.num_bytes_held,
        "num_device_bytes": held.num_device_bytes,
        "device": held.device,
        "residency": held.residency,
        "is_approximate": held.is_approximate,
        "num_steps": held.num_steps,
        "num_preemptions": held.num_preemptions,
        "step": _step(held) if held.HasField("last_step") else None,
        "speculation": _speculation(held) if held.HasField("speculation") else None,
    }


def _step(held: GenerationStatus) -> Object:
    step = held.last_step
    return {
        "num_rows": step.num_rows,
        "num_prefill_tokens": step.num_prefill_tokens,
        "num_drafts": step.num_drafts,
        "context_tokens": step.context_tokens,
        "took_ms": round(step.duration_s * 1e3, 3),
        "predicted_ms": round(step.predicted_s * 1e3, 3),
    }


def _speculation(held: GenerationStatus) -> Object:
    said = held.speculation
    sources = [
        {
            "source": each.counts.source,
            "num_drafted": each.counts.num_drafted,
            "num_accepted": each.counts.num_accepted,
        }
        for each in said.sources
    ]
    return {"num_drafted": said.num_drafted, "num_accepted": said.num_accepted, "sources": sources}


def _rank(rank: int, said: PrefillStatus | None) -> Object:
    """Return the state of a rank; `num_jobs` is null if it does not answer."""
    if said is None:
        return {"rank": rank, "num_jobs": None, "num_jobs_done": None, "trouble": ""}
    trouble = said.stall or said.epoch_error
    return {"rank": rank, "num_jobs": said.num_jobs, "num_jobs_done": said.num_jobs_done, "trouble": trouble}


def _request(request: RequestStatus, now_ns: int) -> Object:
    timings, usage = request.timings, request.usage
    return {
        "number": request.number,
        "id": request.request_id,
        "tenant": request.tenant,
        "state": request.state,
        "generation": request.generation,
        "prefill": request.prefill,
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_cached_tokens": usage.num_cached_tokens,
        "num_output_tokens": usage.num_output_tokens,
        "num_attempts": usage.num_attempts,
        "num_failures": request.num_failures,
        "finish": [reason.value for reason in request.reasons],
        "error": request.error,
        "received_ms": timings.received_ns / 1e6,
        "first_token_ms": _ms(timings.first_token_ns - timings.received_ns) if timings.first_token_ns else None,
        "total_ms": _ms((timings.finished_ns or now_ns) - timings.received_ns),
        "stages": list(_stages(timings, usage.num_output_tokens, now_ns)),
        "taken": taken(timings),
    }


def _stages(timings: Timings, num_output_tokens: int, now_ns: int) -> Iterator[Object]:
    """Yield the stages of a request. If the request still runs, its last stage lasts until `now_ns`."""
    until_now = timings if timings.finished_ns else replace(timings, finished_ns=now_ns)
    for stage in stages_of(until_now, num_output_tokens):
        yield {
            "name": stage.name,
            "rank": stage.rank,
            "from_ms": _ms(stage.at.start_ns - timings.received_ns),
            "to_ms": _ms(stage.at.end_ns - timings.received_ns),
            "known": {name.removeprefix("baton."): value for name, value in stage.attributes.items()},
        }


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


def check_single(asked: Asked) -> None:
    """Raise InvalidArgumentError unless the request has one prompt and one choice: the playground's page can show only
    one choice."""
    if len(asked.prompts) != 1 or asked.num_choices != 1:
        raise InvalidArgumentError("n and prompt: the playground shows one choice of one prompt; use /v1 for more")


def begun(output: Completion) -> Object:
    """Return the first event of the stream: the properties of a request that the server has accepted."""
    return {
        "id": output.request_id,
        "model": output.model,
        "seed": None if output.seed is None else str(output.seed),  # 64 bits, more than JavaScript's numbers hold
        "exact": output.exact,
        "num_prompt_tokens": output.num_prompt_tokens,
    }


def token(event: TokenEvent, own_text: str) -> Object:
    """Return one token's event for the stream. `own_text` is the text of this token alone. The text in `event` may
    belong to several tokens."""
    return {
        "index": event.index,
        "id": None if event.token is None else event.token.token_id,
        "text": event.text,
        "own_text": own_text,
        "at_ms": event.unix_ns / 1e6,
        "finish": None if event.finish is None else event.finish.value,
        "drafts": None if event.drafts is None else asdict(event.drafts),
        "origin": None if event.origin is None else asdict(event.origin),
    }


def ended(output: Completion) -> Object:
    """Return the last event of the stream: the request's usage, and its measured and predicted times."""
    timings = output.timings
    return {
        "usage": None if output.usage is None else asdict(output.usage),
        "taken": None if timings is None else taken(timings),
        "received_ms": None if timings is None else timings.received_ns / 1e6,
        "first_token_ms": None if timings is None else timings.first_token_ns / 1e6,
        "num_resumes": output.num_resumes,
    }
