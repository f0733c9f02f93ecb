"""The port through which received KV leaves `transport`: a sink of slots under timed, fenced leases.

Called by `baton.transport.kv_receiver`; implemented by `generate_workers.slots.table`, which does not depend on gRPC.
All implementations pass tests/conformance/test_kv_sinks.py. All methods are called on the process's asyncio loop.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton.types import KvLayout, Lease, LeaseRef, RequestId, ReserveNumber, SampledToken, TokenRange


@dataclass(frozen=True)
class ReserveSpec:
    """The request for one lease: its owner, its size and its ttl."""

    request_id: RequestId
    attempt: int
    num_tokens: int
    """Tokens whose KV will be pushed: positions [0, num_tokens); at least 1."""
    capacity_tokens: int
    """Tokens that the slot must be able to hold in all, later output included; at least `num_tokens`."""
    ttl_s: float
    """Seconds without a push or renewal after which the slot is freed; > 0."""
    num_choices: int = 1
    """Number of slots: the lease's own, and one for each further choice, which gets the first slot's KV."""
    prefix_blocks: tuple[str, ...] = ()
    """Names of the first blocks of the tokens to be pushed. Used by KvPrefixes; KvSink itself caches no blocks."""
    block_tokens: int = 0
    """Tokens of each block that `prefix_blocks` names."""
    prefills_locally: bool = False
    """True if the lease's own stream computes the KV that the blocks lack, and no rank pushes. Used by KvPrefixes."""
    number: ReserveNumber | None = None
    """Number by which the caller can undo this Reserve if its answer is lost; a sink ignores it."""


class PushTarget(Protocol):
    """One writer's access to a leased slot. Used inside `KvSink.open_push`, on the loop."""

    async def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Take a piece over and renew the lease. `data` holds the range's bytes and is not kept.

        Waits while the sink has no room for pieces on their way to a device. Returns False when the same piece was
        taken over already; memory is then unchanged.

        Raises StaleStampError or LeaseExpiredError when the lease has ended, RangeError for a layer that does not exist
        or a range that is empty, outside the lease, or overlaps another piece in part, and InvalidArgumentError for a
        piece larger than the sink takes at a time. These errors change nothing. Raises TransferError when an earlier
        piece could not be copied to its place, so that the lease has ended. A cancelled wait changes nothing.
        """
        ...

    async def settle(self) -> None:
        """Wait until all pieces of this writer are in their places. Raises TransferError when one could not be copied
        to its place, so that the lease has ended."""
        ...


class KvPrefixes(Protocol):
    """Grants leases that begin with KV of earlier prompts' blocks, which the sink's own node caches."""

    async def reserve(self, request: ReserveSpec) -> Lease:
        """Claim slots as `KvSink.reserve` does, and fill them with the leading blocks that the node has cached.

        The lease's `num_present_tokens` is the number of leading tokens in cached blocks. A writer of the sink copies
        them into the slot, so they are not pushed. Raises the errors of `KvSink.reserve`, and InvalidArgumentError for
        a malformed block name.
        """
        ...


class KvSink(Protocol):
    """Stores received KV in slots under timed, fenced leases. All methods are called on the loop.

    Every method that takes a LeaseRef, except `abort`, raises StaleStampError when the slot is unknown, free or leased
    again, and LeaseExpiredError when the lease was not renewed in time. `abort` does nothing in these cases.
    """

    @property
    def layout(self) -> KvLayout:
        """Return the layout in which the sink stores KV; pieces of another layout do not reach it."""
        ...

    def reserve(self, request: ReserveSpec) -> Lease:
        """Claim `num_choices` slots under a new stamp, all or none.

        Raises ResourceExhaustedError when too few slots are free, and InvalidArgumentError when the request exceeds the
        number or the size of all slots of the sink.
        """
        ...

    def renew(self, ref: LeaseRef, ttl_s: float) -> None:
        """Extend the lease to `ttl_s` seconds from now."""
        ...

    def open_push(self, ref: LeaseRef) -> AbstractContextManager[PushTarget]:
        """Return a context that counts a writer of the slot from enter to exit.

        The slot is not reused before its last writer has left, nor while a piece that was taken over is on its way to
        its place. Entering renews the lease. Errors are raised on enter.
        """
        ...

    async def commit(self, ref: LeaseRef, firsts: Sequence[SampledToken], wait_s: float = math.inf) -> int:
        """Complete the lease with each choice's first token; return the bytes that the slot's pieces hold.

        Waits for bytes that are missing or on their way to a device, at most `wait_s` seconds and at most the lease's
        ttl, then raises IncompletePushError that names the first such range. The push may continue and Commit may be
        repeated until the lease ends. Idempotent for the same tokens. Raises LeaseError for other tokens, and for a
        number of tokens that is not the lease's number of choices. A cancelled wait changes nothing.
        """
        ...

    def abort(self, ref: LeaseRef) -> None:
        """End the lease; its slot is free once its last writer has left. Idempotent; a stale stamp changes nothing."""
        ...
