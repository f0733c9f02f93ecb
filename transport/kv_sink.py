"""The port through which received KV leaves transport: a sink of slots under timed, fenced leases.

Implemented by whoever owns KV memory, who need not know grpc; tests/conformance/test_kv_sinks.py holds for all of them.
Steps 3 and 7 of a request's way (DESIGN.md, section 4).
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton.ids import RequestId, ReserveNumber
from baton.types import KvLayout, Lease, LeaseRef, SampledToken, TokenRange


@dataclass(frozen=True)
class ReserveSpec:
    """What a lease is asked for."""

    request_id: RequestId
    attempt: int
    num_tokens: int
    """Tokens whose KV will be pushed: positions [0, num_tokens), at least 1."""
    capacity_tokens: int
    """Tokens that the slot must be able to hold in all, later output included; at least `num_tokens`."""
    ttl_s: float
    """Seconds without a push or renewal after which the slot is freed; > 0."""
    num_choices: int = 1
    """Slots: the lease's own, and one for each further choice, which gets its KV from there."""
    prefix_blocks: tuple[str, ...] = ()
    """Names of the first blocks of those tokens, for a KvPrefixes; a sink by itself has none of them."""
    block_tokens: int = 0
    """Tokens of each of them."""
    prefills_locally: bool = False
    """Nobody pushes: the lease's stream computes what those blocks do not have. For a KvPrefixes."""
    number: ReserveNumber | None = None
    """By which the receiver can be told to undo this Reserve; no sink's business."""


class PushTarget(Protocol):
    """One writer's way into a leased slot; used inside `KvSink.open_push`, on the loop."""

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copies a piece into place and renews the lease; `data` is the range's bytes and is not kept.

        Returns False when the same piece is there already: memory is left as it is. Raises StaleStampError or
        LeaseExpiredError when the lease ended meanwhile, RangeError for a layer that does not exist and for a range
        that is empty, outside the lease, or overlaps another piece in part; then nothing is changed.
        """
        ...


class KvPrefixes(Protocol):
    """Leases that begin with KV that is at hand: blocks of earlier prompts, on the sink's own node."""

    async def reserve(self, request: ReserveSpec) -> Lease:
        """As KvSink.reserve. The lease says how many of the first tokens need not be pushed: those of as many leading
        blocks as there are, which a writer like any other copies into the slot. Raises InvalidArgumentError for a
        block's name that is none."""
        ...


class KvSink(Protocol):
    """Where received KV goes: slots under timed, fenced leases. All methods are called on the loop.

    Every method that takes a LeaseRef raises StaleStampError when the slot is unknown, free or leased anew, and
    LeaseExpiredError when the lease was not renewed in time; `abort` changes nothing instead.
    """

    @property
    def layout(self) -> KvLayout:
        """How the sink stores KV; pieces of another layout never reach it."""
        ...

    def reserve(self, request: ReserveSpec) -> Lease:
        """Claims slots under a new stamp, all or none. Raises ResourceExhaustedError when too few are free, and
        InvalidArgumentError when there are fewer, or smaller ones, than asked for."""
        ...

    def renew(self, ref: LeaseRef, ttl_s: float) -> None:
        """Lets the lease live `ttl_s` seconds from now."""
        ...

    def open_push(self, ref: LeaseRef) -> AbstractContextManager[PushTarget]:
        """Counts a writer, from enter to exit: the slot is not reused before its last writer has left. Renews the
        lease. Errors are raised on enter."""
        ...

    async def commit(self, ref: LeaseRef, firsts: Sequence[SampledToken], wait_s: float = math.inf) -> int:
        """Completes the lease with each choice's first token; returns the bytes that the slot's pieces hold.

        Waits for missing bytes, at most `wait_s` seconds and at most the lease's ttl, then raises IncompletePushError
        that names the first missing range: the push may go on and Commit may be repeated while the lease lives.
        Idempotent for the same tokens; others, or more or fewer than the lease has choices, raise LeaseError. A
        cancelled wait changes nothing.
        """
        ...

    def abort(self, ref: LeaseRef) -> None:
        """Ends the lease; its slot is free once its last writer has left. Idempotent; a stale stamp changes nothing."""
        ...
