"""The states of a request, and one table of the moves between them.

    QUEUED -> PLACING -> PREFILLING -> STREAMING -> FINISHED
                 ^           |             |
                 +-----------+-------------+      an attempt failed, the next begins
    every state before FINISHED may move there at once, and no move leaves FINISHED: each request ends exactly once

Used by `orchestrator.requests.record`. Pure.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class RequestState(Enum):
    """The stage that a request has reached."""

    QUEUED = "queued"
    PLACING = "placing"
    """Has left the queue; its groups and its slot are being chosen."""
    PREFILLING = "prefilling"
    """Has a generation group; the present attempt has made no token yet."""
    STREAMING = "streaming"
    FINISHED = "finished"


class RequestMove(Enum):
    """An event that moves a request to another state."""

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
"""The state after every allowed move, by state and move; any other move is a bug in the orchestrator."""
