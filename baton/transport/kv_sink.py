"""Interface of a sink, to which `transport` passes received KV. A sink stores KV in slots. Each slot is claimed by a
lease, which ends if it is not renewed within its ttl, and whose stamp is not valid for later leases of the slot.

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
    """Request for one lease: owner, size and ttl."""

    request_id: RequestId
    attempt: int
    num_tokens: int
    """Number of tokens whose KV will be pushed, at positions [0, num_tokens); at least 1."""
    capacity_tokens: int
    """Number of tokens that the slot must be able to hold in total, including later output; at least `num_tokens`."""
    ttl_s: float
    """Seconds without a push or renewal after which the slot is freed; > 0."""
    num_choices: int = 1
    """Number of slots: one for the lease itself, and one for each further choice, into which the first slot's KV is
    copied."""
    prefix_blocks: tuple[str, ...] = ()
    """Names of the leading blocks of the tokens to be pushed. Used by KvPrefixes; a KvSink itself does not cache
    blocks."""
    block_tokens: int = 0
    """Number of tokens of each block in `prefix_blocks`."""
    prefills_locally: bool = False
    """True if the generation group itself computes the KV that the cached blocks lack, and no rank pushes KV. Used by
    KvPrefixes."""
    number: ReserveNumber | None = None
    """Number by which the caller can undo this Reserve if it does not receive the answer. A sink ignores it."""


class PushTarget(Protocol):
    """Access of one writer to a leased slot. Used inside `KvSink.open_push`, on the loop."""

    async def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Accept a piece and renew the lease. `data` holds the bytes of the token range and is not kept.

        Waits while the sink has no room for pieces that are being copied to a device. Returns False when the same piece
        was already accepted; memory is then unchanged.

        Raises StaleStampError or LeaseExpiredError when the lease has ended, RangeError for a layer that does not exist
        or a range that is empty, outside the lease, or overlaps another piece in part, and InvalidArgumentError for a
        piece that is larger than the sink accepts. After these errors the slot is unchanged. Raises TransferError when
        an earlier piece could not be copied into the slot, which ends the lease. A cancelled wait does not change the
        slot.
        """
        ...

    async def settle(self) -> None:
        """Wait until all pieces of this writer are in the slot. Raises TransferError when a piece could not be copied
        into the slot, which ends the lease."""
        ...


class KvPrefixes(Protocol):
    """Grants leases whose slots are filled with cached KV of earlier prompts' blocks, from the sink's own node."""

    async def reserve(self, request: ReserveSpec) -> Lease:
        """Claim slots as `KvSink.reserve` does, and fill them with the leading blocks that the node has cached.

        The lease's `num_present_tokens` is the number of leading tokens in cached blocks. A writer of the sink copies
        them into the slot, so they are not pushed. Raises the errors of `KvSink.reserve`, and InvalidArgumentError for
        a malformed block name.
        """
        ...


class KvSink(Protocol):
    """Stores received KV in slots under timed, fenced leases. All methods are called on the loop.

    Every method that takes a LeaseRef, except `abort`, raises StaleStampError when the slot is unknown, free, or leased
    again under a new stamp, and LeaseExpiredError when the lease was not renewed in time. In these cases, `abort` does
    nothing.
    """

    @property
    def layout(self) -> KvLayout:
        """Return the layout in which the sink stores KV. The caller refuses pieces of other layouts."""
        ...

    def reserve(self, request: ReserveSpec) -> Lease:
        """Claim `num_choices` slots under a new stamp. If too few are free, none is claimed.

        Raises ResourceExhaustedError when too few slots are free, and InvalidArgumentError when the request exceeds the
        number or the size of all slots of the sink.
        """
        ...

    def renew(self, ref: LeaseRef, ttl_s: float) -> None:
        """Extend the lease to `ttl_s` seconds from now."""
        ...

    def open_push(self, ref: LeaseRef) -> AbstractContextManager[PushTarget]:
        """Return a context in which the caller counts as a writer of the slot.

        The slot is not reused before the contexts of all its writers have exited and all accepted pieces have been
        copied. Entering the context renews the lease, and raises the errors.
        """
        ...

    async def commit(self, ref: LeaseRef, firsts: Sequence[SampledToken], wait_s: float = math.inf) -> int:
        """Complete the lease with the first token of each choice. Return the number of bytes of all pieces in the slot.

        Waits for bytes that are missing or still being copied to a device, for at most `wait_s` seconds and at most the
        lease's ttl. Then raises IncompletePushError, which names the first such token range. The push may continue and
        Commit may be repeated until the lease ends. Idempotent for the same tokens. Raises LeaseError for other tokens,
        and for a number of tokens that is not the lease's number of choices. A cancelled wait does not change the
        lease.
        """
        ...

    def abort(self, ref: LeaseRef) -> None:
        """End the lease. Its slot is free once all writers have closed their contexts. Idempotent; does nothing for a
        stale stamp."""
        ...
