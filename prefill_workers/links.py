"""Messages between two ranks of a chain, and the port that sends and receives them.

A link is a FIFO of messages from one rank to another. A message is a fixed 64-byte header and, for DATA, one payload:
the KV of one layer for some of a job's tokens, called a piece (`prefill_workers.kv_pipeline` defines the pieces and
their order). A payload is in host memory or, if the links connect devices, in device memory. Messages have no tags:
each is received completely, in the order of sending. So a send is never abandoned: an aborted job ends with an ABORT
message, and its remaining messages are received into scratch memory. Links exist for one epoch: when a link breaks, or
any rank closes its links, the epoch ends and the next one has new links.

Used by `prefill_workers.kv_pipeline` and `prefill_workers.epoch`; implemented by `prefill_workers.torch_links`, which
starts its own threads, and by an in-process version for tests.
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
"""Memory of a payload: bytes in host memory or, if the links are `on_device`, a contiguous uint8 tensor on the
device."""


class LinkStatus(IntEnum):
    """Kind of a message on a link."""

    DATA = 0
    """KV of `tokens` in `layer`; the payload follows."""
    ABORT = 1
    """The sender aborted the job and will send no more messages about it."""
    ALIVE = 2
    """The sender still works, on other jobs or on the preparation of this job: the receiver should keep waiting."""
    CLOSE = 3
    """The sender closed its links: the epoch is over. Links send and receive it themselves; it is never passed to a
    handler."""


@dataclass(frozen=True)
class LinkHeader:
    """Header at the start of every message: eight little-endian int64 values, the first of which is a magic number."""

    epoch: Epoch
    job: JobId
    layer: int
    tokens: TokenRange
    status: LinkStatus
    num_bytes: int
    """Number of bytes of the payload that follows; 0: no payload follows."""

    @classmethod
    def bare(cls, epoch: Epoch, job: JobId, status: LinkStatus) -> "LinkHeader":
        """Return the header of a message about a job without tokens or a payload."""
        return cls(epoch, job, 0, TokenRange(0, 0), status, 0)

    def pack(self) -> bytes:
        """Return the header as HEADER_BYTES bytes."""
        tokens = self.tokens
        return _FORMAT.pack(
            _MAGIC, self.epoch, self.job, self.layer, tokens.start, tokens.end, self.status, self.num_bytes
        )

    @classmethod
    def unpack(cls, data: bytes) -> "LinkHeader":
        """Return the header that `pack` encoded as these bytes. Raises ChainError if the bytes are not a valid
        header."""
        magic, epoch, job, layer, start, end, status, num_bytes = _FORMAT.unpack(data)
        if magic != _MAGIC or not 0 <= start <= end or num_bytes < 0 or not 0 <= status <= LinkStatus.CLOSE:
            raise ChainError(f"a link carried no valid header ({data[:16].hex()}...): all ranks must run one version")
        return cls(Epoch(epoch), JobId(job), layer, TokenRange(start, end), LinkStatus(status), num_bytes)


class LinkHandler(Protocol):
    """Handler of a rank's messages. Called on link threads: `place_for` and `received` of one link never run at the
    same time, those of different links may."""

    def place_for(self, source: Rank, header: LinkHeader) -> Payload | None:
        """Return writable memory of `header.num_bytes` bytes for the payload, or None to drop the payload. Called once
        for every message with a payload, before the payload is received; the memory must stay valid. May block, which
        delays all messages of `source`, but not beyond the end of the epoch."""
        ...

    def received(self, source: Rank, header: LinkHeader) -> None:
        """Handle a message that has arrived. Its payload, if any, is in the memory that `place_for` returned."""
        ...

    def sent(self, target: Rank, header: LinkHeader) -> None:
        """Record that a message was sent, so that its memory is no longer read."""
        ...

    def broken(self, error: ChainError) -> None:
        """Handle a broken link, which ends all of this rank's links. May be called for several links, but not after
        `close`."""
        ...


class Links(Protocol):
    """Links from one rank to all other ranks of its group, for one epoch."""

    @property
    def on_device(self) -> bool:
        """Return whether payloads are in device memory at both ends of all links."""
        ...

    def send(self, target: Rank, header: LinkHeader, payload: Payload | None) -> None:
        """Enqueue one message and return at once. Thread-safe. `payload` must have `header.num_bytes` bytes, or be None
        if the header has no payload, and must not change until the handler's `sent` is called. Messages to one target
        are sent in the order of the calls. After `close`, or on a broken link, the message is dropped."""
        ...

    def close(self) -> None:
        """Drop messages that are not being sent yet, notify all peers and return at once; peers see their links broken.
        The handler is still called for messages that are being sent or received, and for no others. May be called on
        any thread. Idempotent."""
        ...

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait, after `close`, until all link threads have ended, and return whether they have. They end when each peer
        has closed its links or is dead. A stopped peer blocks them until it is killed."""
        ...


ConnectLinks = Callable[[LinkHandler], Links]
"""Function that joins an epoch. Blocks until this rank is connected to all others; raises LinkBrokenError on a
timeout."""


def join_all(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds in total for `threads` to end, and return whether all have ended."""
    end_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(end_s - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in threads)
