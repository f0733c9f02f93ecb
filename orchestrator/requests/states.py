"""States of a request, and the table of allowed transitions between them.

    QUEUED -> PLACING -> PREFILLING -> STREAMING -> FINISHED
                 ^           |             |
                 +-----------+-------------+      an attempt failed, the next begins

A request may move to FINISHED from any other state. No transition leaves FINISHED, so each request ends exactly once.
Used by `orchestrator.requests.record`. Does no I/O.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class RequestState(Enum):
    """Stage that a request has reached."""

    QUEUED = "queued"
    PLACING = "placing"
    """The request has left the queue. The groups that will serve it, and its slots, are being selected."""
    PREFILLING = "prefilling"
    """The request has a generation group. The present attempt has not produced a token yet."""
    STREAMING = "streaming"
    FINISHED = "finished"


class RequestMove(Enum):
    """Event that moves a request to another state."""

    ADMIT = "admit"
    PLACE = "place"
    TOKEN = "token"
    RETRY = "retry"
    FINISH = "finish"


TRANSITIONS: Mapping[tuple[RequestState, RequestMove], RequestState] = MappingProxyType(
    {
        (RequestState.QUEUED, RequestMove.ADMIT): RequestState.PLACING,
        (RequestState.PLACING, RequestMove.PLACE): RequestState.PREFILLING,
        (RequestState.PREFILLING, RequestMove.TOKEN): RequestState.STREAMING,
        (RequestState.STREAMING, RequestMove.TOKEN): RequestState.STREAMING,
        (RequestState.PLACING, RequestMove.RETRY): RequestState.PLACING,
        (RequestState.PREFILLING, RequestMove.RETRY): RequestState.PLACING,
        (RequestState.STREAMING, RequestMove.RETRY): RequestState.PLACING,
        (RequestState.QUEUED, RequestMove.FINISH): RequestState.FINISHED,
        (RequestState.PLACING, RequestMove.FINISH): RequestState.FINISHED,
        (RequestState.PREFILLING, RequestMove.FINISH): RequestState.FINISHED,
        (RequestState.STREAMING, RequestMove.FINISH): RequestState.FINISHED,
    }
)
"""Next state of a request, by its present state and the move. A move that is not in the table is a bug in the
orchestrator."""
