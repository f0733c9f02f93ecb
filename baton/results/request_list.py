"""Requests of one orchestrator as values: those that wait or run, and the latest that have ended. Pure."""

from dataclasses import dataclass

from baton.results.completion import Usage
from baton.results.timings import Timings
from baton.types import FinishReason


@dataclass(frozen=True)
class RequestStatus:
    """State of one request as the orchestrator sees it, without its prompt and outputs."""

    number: int
    """Sequence number of the request in this orchestrator, starting at 1."""
    request_id: str
    """Id of the request; empty if the request belongs to another tenant than the caller."""
    tenant: str
    """Tenant of the request; empty if the request belongs to another tenant than the caller."""
    state: str
    """Stage that the request has reached: queued, placing, prefilling, streaming or finished."""
    generation: str
    """Name of the last attempt's generation group; empty until the request has been placed."""
    prefill: str
    """Name of the prefill group whose chain serves the last attempt; empty if no chain does."""
    usage: Usage
    """Number of tokens and attempts so far."""
    timings: Timings
    """Times of the last attempt, without the times of single layers. `finished_ns` is 0 while the request runs."""
    reasons: tuple[FinishReason, ...] = ()
    """Reason why each choice ended; empty while the request runs."""
    error: str = ""
    """Name of the error that ended the request; empty when all choices ended without an error."""
    num_failures: int = 0
    """Number of attempts that have failed."""


@dataclass(frozen=True)
class RequestList:
    """Requests of one orchestrator at one instant."""

    now_ns: int
    """Instant at which the list was made, by the orchestrator's clock, in unix nanoseconds."""
    requests: tuple[RequestStatus, ...]
    """Requests in order of arrival, latest first."""
