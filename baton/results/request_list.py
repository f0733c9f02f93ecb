"""The requests of one orchestrator, as values: those that wait or run, and the latest that have ended. Pure."""

from dataclasses import dataclass

from baton.results.completion import Usage
from baton.results.timings import Timings
from baton.types import FinishReason


@dataclass(frozen=True)
class RequestStatus:
    """One request, as the orchestrator sees it, without its prompt and outputs."""

    number: int
    """Number of the request among all of this orchestrator, from 1."""
    request_id: str
    """Id of the request; empty for a request of another tenant than the caller's."""
    tenant: str
    """Tenant of the request; empty where the id is."""
    state: str
    """Stage that the request has reached: queued, placing, prefilling, streaming or finished."""
    generation: str
    """Name of the last attempt's generation group; empty before it was placed."""
    prefill: str
    """Name of the prefill group whose chain serves the last attempt; empty without a chain."""
    usage: Usage
    """Tokens and attempts so far."""
    timings: Timings
    """Times of the last attempt, without those of layers; `finished_ns` is 0 while the request runs."""
    reasons: tuple[FinishReason, ...] = ()
    """Why each choice ended; empty while the request runs."""
    error: str = ""
    """Name of the error that ended the request; empty when its choices ended by themselves."""
    num_failures: int = 0
    """Attempts that have failed."""


@dataclass(frozen=True)
class RequestList:
    """The requests of one orchestrator at one instant."""

    now_ns: int
    """The orchestrator's clock at that instant, in unix nanoseconds."""
    requests: tuple[RequestStatus, ...]
    """The requests, latest arrival first."""
