"""Interface of a sink, which stores received KV in slots. A sender needs a lease on a slot. A lease expires if it is
not renewed within its TTL. Each lease has a stamp; when a slot gets a new lease, the stamps of earlier leases become
invalid.

Called by `baton.transport.kv_receiver`. Implemented by `generate_workers.slots.table`, which does not depend on gRPC.
All implementations must pass tests/conformance/test_kv_sinks.py. Methods are called on the process's asyncio loop.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton.types import KvLayout, Lease, LeaseRef, RequestId, ReserveNumber, SampledToken, TokenRange


@dataclass(frozen=True)
class ReserveSpec:
    """Parameters of one lease request: the owner, the sizes in tokens, the number of slots, and the time to live."""

    request_id: RequestId
    attempt: int
    num_tokens: int
    """Number of tokens whose KV will be pushed; at least 1. Their positions are [0, num_tokens)."""
    capacity_tokens: int
    """Number of tokens that the slot must be able to hold in total, including later output; at least `num_tokens`."""
    ttl_s: float
    """Seconds without a push or renewal after which the slot is freed; > 0."""
    num_choices: int = 1
    """Number of slots to reserve, one for each choice of the request. KV is pushed into the first slot and copied from
    there into the others."""
    prefix_blocks: tuple[str, ...] = ()
    """Names of the prompt's leading blocks, in order. Each is a hash of the tokens up to the end of the block. Sinks
    with a prefix cache (KvPrefixes) use the names to find cached blocks; other sinks ignore them."""
    block_tokens: int = 0
    """Number of tokens of each block in `prefix_blocks`."""
    prefills_locally: bool = False
    """True if the generation group itself computes the KV of the prompt's uncached tokens, so that no prefill rank
    pushes KV. Supported only by sinks with a prefix cache (KvPrefixes)."""
    number: ReserveNumber | None = None
    """Number that identifies this Reserve call. A caller that does not receive the answer uses it to undo the call. A
    sink ignores it."""


class PushTarget(Protocol):
    """Access of one writer to a leased slot. Obtained from `KvSink.open_push` and used only inside that context, on the
    event loop."""

    async def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Accept a piece of KV and renew the lease. A piece is the KV of a token range in one layer; `data` holds its
        bytes, and the sink keeps no reference to `data`.

        Waits while the sink cannot buffer more pieces that are being copied to a device. Returns False if the same
        piece was already accepted; memory is then unchanged.

        Raises:

        - StaleStampError or LeaseExpiredError if the lease has ended.
        - RangeError if the layer does not exist, if the range is empty or outside the lease, or if it partly overlaps
          another piece.
        - InvalidArgumentError if the piece is larger than the sink accepts.
        - TransferError if an earlier piece could not be copied into the slot. The lease has then ended.

        After the first three kinds of errors, the slot is unchanged. Cancelling the wait does not change the slot.
        """
        ...

    async def settle(self) -> None:
        """Wait until all pieces of this writer are in the slot. Raises TransferError if a piece could not be copied
        into the slot; the lease has then ended."""
        ...


class KvPrefixes(Protocol):
    """Interface of a KV sink that also has a prefix cache. It grants leases on slots. It fills the slots with the KV of
    those leading blocks of a prompt that are cached on the sink's node."""

    async def reserve(self, request: ReserveSpec) -> Lease:
        """Reserve slots as `KvSink.reserve` does, and fill them with the KV of the leading blocks that this node has
        cached.

        The lease's `num_present_tokens` is the number of leading tokens in cached blocks. The sink copies the KV of
        these tokens into the slot itself, so the sender does not push it. Raises the errors of `KvSink.reserve`, and
        InvalidArgumentError for a malformed block name.
        """
        ...


class KvSink(Protocol):
    """Stores received KV in slots. A slot is reserved by a lease, which expires if it is not renewed within its TTL.
    All methods are called on the asyncio loop.

    A LeaseRef identifies a lease by its slot and stamp. Every method with a LeaseRef argument, except `abort`, raises
    StaleStampError if the slot does not exist, is free, or has a newer lease. It raises LeaseExpiredError if the lease
    was not renewed in time. `abort` does nothing in these cases.
    """

    @property
    def layout(self) -> KvLayout:
        """Return the layout in which the sink stores KV. The caller must refuse pieces with another layout."""
        ...

    def reserve(self, request: ReserveSpec) -> Lease:
        """Reserve `num_choices` slots under a new stamp, and return the lease. If too few slots are free, none is
        reserved.

        Raises ResourceExhaustedError if too few slots are free. Raises InvalidArgumentError if the request needs more
        slots, or larger slots, than the sink has.
        """
        ...

    def renew(self, ref: LeaseRef, ttl_s: float) -> None:
        """Extend a lease to `ttl_s` seconds from now."""
        ...

    def open_push(self, ref: LeaseRef) -> AbstractContextManager[PushTarget]:
        """Return a context manager for a writer of the slot. Entering the context renews the lease. It raises
        StaleStampError or LeaseExpiredError if the lease has ended.

        The slot is not reused until all its writers have exited their contexts and all accepted pieces have been
        copied.
        """
        ...

    async def commit(self, ref: LeaseRef, firsts: Sequence[SampledToken], wait_s: float = math.inf) -> int:
        """Wait until all KV of a lease has arrived, and record the first token of each choice. Return the number of
        bytes of KV in the slot.

        Waits for KV that is missing or still being copied to a device, for at most `wait_s` seconds and at most the
        lease's TTL. Raises IncompletePushError if KV is still missing then; the error names the first missing token
        range. The push may continue, and commit may be called again until the lease ends.

        Idempotent for the same tokens. Raises LeaseError if a repeated call has other tokens, or if the number of
        tokens is not the lease's number of choices. If the wait is cancelled, the lease does not change.
        """
        ...

    def abort(self, ref: LeaseRef) -> None:
        """End a lease. Its slot becomes free when all writers have closed their contexts. Idempotent. Does nothing if
        the lease has already ended."""
        ...
