"""List of one orchestrator's requests: those that wait or run, and the last ones that ended. Does no I/O."""

from dataclasses import dataclass

from baton.results.completion import Usage
from baton.results.timings import Timings
from baton.types import FinishReason


@dataclass(frozen=True)
class RequestStatus:
    """State of one request in the orchestrator, without its prompt and its outputs."""

    number: int
    """Sequence number of the request in this orchestrator, starting at 1."""
    request_id: str
    """Id of the request. Empty if the request belongs to another tenant than the caller."""
    tenant: str
    """Tenant of the request. Empty if the request belongs to another tenant than the caller."""
    state: str
    """Current stage of the request: queued, placing, prefilling, streaming or finished."""
    generation: str
    """Name of the generation group of the last attempt. Empty until the request has been placed."""
    prefill: str
    """Name of the prefill group of the last attempt. Empty if no prefill chain serves the request."""
    usage: Usage
    """Numbers of tokens and attempts so far."""
    timings: Timings
    """Times of the last attempt's stages, without the times of individual layers. `finished_ns` is 0 while the request
    runs."""
    reasons: tuple[FinishReason, ...] = ()
    """Reason why each choice ended, one for each choice. Empty while the request runs."""
    error: str = ""
    """Name of the error with which the request ended. Empty if the request is running or ended without an error."""
    num_failures: int = 0
    """Number of attempts that have failed."""


@dataclass(frozen=True)
class RequestList:
    """Requests of one orchestrator at one point in time."""

    now_ns: int
    """Time at which the list was created, by the orchestrator's clock, in unix nanoseconds."""
    requests: tuple[RequestStatus, ...]
    """Requests, sorted by arrival; the latest request is first."""
