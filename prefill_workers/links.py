"""The messages that pass between two ranks of a chain, and the port that passes them.

A link is a FIFO of messages from one rank to another. A message is a fixed 64-byte header and, for DATA, one payload:
the KV of one layer for some of a job's tokens, called a piece (`prefill_workers.kv_pipeline` defines the pieces and
their order). A payload is in host memory or, where the links are between devices, in device memory. Messages carry no
tags: receivers take them in the order in which they were sent, each to its end. So a send is never abandoned: a job
that is given up ends with an ABORT message, and messages for such a job are received into scratch memory. Links last as
long as an epoch: when one breaks, or any rank closes its own, all are replaced.

Used by `prefill_workers.kv_pipeline` and `prefill_workers.epoch`; implemented by `prefill_workers.torch_links`, with
threads of its own, and in one process for tests.
"""

import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from baton.errors import ChainError
from baton.types import Epoch, JobId, Rank, TokenRange

HEADER_BYTES = 64
_MAGIC = 0x4261746F6E4B5652  # "BatonKVR"
_FORMAT = struct.Struct("<8q")


Payload = memoryview | Tensor
"""A payload's memory: bytes of the host or, where links are `on_device`, a contiguous uint8 tensor of the device."""


class LinkStatus(IntEnum):
    """The kind of a message."""

    DATA = 0
    """KV of `tokens` in `layer`; the payload follows."""
    ABORT = 1
    """The sender gave the job up and will send no more of it."""
    ALIVE = 2
    """The sender still works, on other jobs first, or prepares this job: the receiver should keep waiting."""
    CLOSE = 3
    """The sender closed its links: the epoch is over. Sent and read by Links only, never passed to a handler."""


@dataclass(frozen=True)
class LinkHeader:
    """The first part of every message: eight little-endian int64, the first of which is a magic number."""

    epoch: Epoch
    job: JobId
    layer: int
    tokens: TokenRange
    status: LinkStatus
    num_bytes: int
    """Bytes of the payload that follows; 0: no payload follows."""

    @classmethod
    def bare(cls, epoch: Epoch, job: JobId, status: LinkStatus) -> "LinkHeader":
        """Return the header of a message about a job that has no tokens and no payload."""
        return cls(epoch, job, 0, TokenRange(0, 0), status, 0)

    def pack(self) -> bytes:
        """Return the header as HEADER_BYTES bytes."""
        tokens = self.tokens
        return _FORMAT.pack(
            _MAGIC, self.epoch, self.job, self.layer, tokens.start, tokens.end, self.status, self.num_bytes
        )

    @classmethod
    def unpack(cls, data: bytes) -> "LinkHeader":
        """Return the header that `pack` made these bytes of. Raises ChainError for any other bytes."""
        magic, epoch, job, layer, start, end, status, num_bytes = _FORMAT.unpack(data)
        if magic != _MAGIC or not 0 <= start <= end or num_bytes < 0 or not 0 <= status <= LinkStatus.CLOSE:
            raise ChainError(f"a link carried no valid header ({data[:16].hex()}...): all ranks must run one version")
        return cls(Epoch(epoch), JobId(job), layer, TokenRange(start, end), LinkStatus(status), num_bytes)


class LinkHandler(Protocol):
    """Handles a rank's messages, on link threads: one `place_for` or `received` at a time per link, several links at
    the same time."""

    def place_for(self, source: Rank, header: LinkHeader) -> Payload | None:
        """Return writable memory of `header.num_bytes` bytes for the payload, or None to drop the payload. Called once
        for every message with a payload, before the payload is received; the memory must stay valid. May block, which
        delays all messages of `source`, but not beyond the end of the epoch."""
        ...

    def received(self, source: Rank, header: LinkHeader) -> None:
        """Handle a message that has arrived; its payload, if any, is in its place."""
        ...

    def sent(self, target: Rank, header: LinkHeader) -> None:
        """Note that a message has left: its memory is no longer read."""
        ...

    def broken(self, error: ChainError) -> None:
        """Handle the loss of a link, which ends all of this rank's links. May be called for several links; not after
        `close`."""
        ...


class Links(Protocol):
    """One rank's links to all other ranks of its group, for one epoch."""

    @property
    def on_device(self) -> bool:
        """Return whether payloads are in device memory, at both ends of all links."""
        ...

    def send(self, target: Rank, header: LinkHeader, payload: Payload | None) -> None:
        """Enqueue one message and return at once. Thread-safe. `payload` must have `header.num_bytes` bytes, or be None
        for a bare header, and must not change until the handler's `sent`. Messages to one target leave in the order of
        the calls. After `close`, or on a broken link, the message is dropped."""
        ...

    def close(self) -> None:
        """Drop messages that are not being sent yet, notify all peers and return at once; peers see their links broken.
        The handler is still called for a message that is being sent or received, and for no other. Any thread,
        idempotent."""
        ...

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait, after `close`, until all link threads have ended, and return whether they have. They end when all peers
        have closed their links too, or are dead; a stopped peer holds them until it is killed."""
        ...


ConnectLinks = Callable[[LinkHandler], Links]
"""A function that joins an epoch: blocks until this rank has met all others; raises LinkBrokenError on a timeout."""


def join_all(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds in all until `threads` have ended; return whether they have."""
    end_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(end_s - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in threads)
