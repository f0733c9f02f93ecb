"""Defines the messages between two ranks of a chain, and the interface that sends and receives them.

A link is a FIFO of messages from one rank to another. A message is a fixed 64-byte header and, for DATA, one payload:
the KV of one layer for some of a job's tokens, called a piece (`prefill_workers.kv_pipeline` defines the pieces and
their order). A payload is in host memory or, if the links transfer device memory, in device memory.

Messages have no tags: each is received completely, in the order of sending. Therefore a send is never abandoned. An
aborted job ends with an ABORT message, and its remaining messages are received into scratch memory. Links exist for one
epoch: when a link breaks, or any rank closes its links, the epoch ends and the next one has new links.

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
"""Memory of a payload. It is a memoryview of bytes in host memory or, if the links are `on_device`, a contiguous uint8
tensor on the device."""


class LinkStatus(IntEnum):
    """Kind of a message that is sent over a link."""

    DATA = 0
    """Message with the KV of `tokens` in `layer`, which is the payload."""
    ABORT = 1
    """Message that the sender has aborted the job and will send no more messages about it."""
    ALIVE = 2
    """Message that the sender still works, on other jobs or on the preparation of this job. The receiver should keep
    waiting."""
    CLOSE = 3
    """Message that the sender has closed its links, which ends the epoch. The links send and receive this message
    themselves. It is never passed to a handler."""


@dataclass(frozen=True)
class LinkHeader:
    """Header at the start of every message. It is encoded as eight little-endian int64 values, of which the first is a
    magic number."""

    epoch: Epoch
    job: JobId
    layer: int
    tokens: TokenRange
    status: LinkStatus
    num_bytes: int
    """Number of bytes of the payload that follows the header; 0 if there is no payload."""

    @classmethod
    def bare(cls, epoch: Epoch, job: JobId, status: LinkStatus) -> "LinkHeader":
        """Return the header of a message about the job `job`. The message has no tokens and no payload, for example an
        ABORT message."""
        return cls(epoch, job, 0, TokenRange(0, 0), status, 0)

    def pack(self) -> bytes:
        """Return the header encoded as `HEADER_BYTES` bytes."""
        tokens = self.tokens
        return _FORMAT.pack(
            _MAGIC, self.epoch, self.job, self.layer, tokens.start, tokens.end, self.status, self.num_bytes
        )

    @classmethod
    def unpack(cls, data: bytes) -> "LinkHeader":
        """Return the header that these bytes encode, as written by `pack`. Raises ChainError if they are not a valid
        header."""
        magic, epoch, job, layer, start, end, status, num_bytes = _FORMAT.unpack(data)
        if magic != _MAGIC or not 0 <= start <= end or num_bytes < 0 or not 0 <= status <= LinkStatus.CLOSE:
            raise ChainError(f"a link carried no valid header ({data[:16].hex()}...): all ranks must run one version")
        return cls(Epoch(epoch), JobId(job), layer, TokenRange(start, end), LinkStatus(status), num_bytes)


class LinkHandler(Protocol):
    """Handler of a rank's messages. Its methods are called on link threads. `place_for` and `received` never run at the
    same time for one link, but may do so for different links."""

    def place_for(self, source: Rank, header: LinkHeader) -> Payload | None:
        """Return writable memory of `header.num_bytes` bytes for a payload that is about to be received. Return None to
        drop the payload. The memory must stay valid until the payload has arrived.

        Called once for every message with a payload. The call may block, but must return when the epoch ends. While
        it blocks, no other message of the rank `source` is received.
        """
        ...

    def received(self, source: Rank, header: LinkHeader) -> None:
        """Handle a message that has arrived. If it has a payload, the payload is in the memory that `place_for`
        returned."""
        ...

    def sent(self, target: Rank, header: LinkHeader) -> None:
        """Handle the end of sending a message. The memory of its payload is not read any more."""
        ...

    def broken(self, error: ChainError) -> None:
        """Handle a broken link. One broken link ends all links of this rank. May be called once for each broken link.
        Not called after `close`."""
        ...


class Links(Protocol):
    """Links from one rank to all other ranks of its group, for one epoch."""

    @property
    def on_device(self) -> bool:
        """Return True if payloads are in device memory at both ends of all links."""
        ...

    def send(self, target: Rank, header: LinkHeader, payload: Payload | None) -> None:
        """Queue one message for the rank `target`, and return immediately. Messages to one target are sent in the order
        of the calls. After `close`, or on a broken link, the message is dropped. Thread-safe.

        `payload` must have `header.num_bytes` bytes, or be None if the header has no payload. Its memory must not
        change until the handler's method `sent` is called.
        """
        ...

    def close(self) -> None:
        """Close the links, and return immediately. Queued messages are dropped, and all peers are notified. Messages
        that are being sent or received are completed. After them, the handler is called for no further message. To the
        peers, the links appear broken. May be called on any thread. Idempotent."""
        ...

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until all link threads have ended, for at most `timeout_s` seconds. Return True if all have ended. Call
        it after `close`. A thread ends when its peer has closed its links or is dead. A stopped peer blocks the thread
        until the peer is killed."""
        ...


ConnectLinks = Callable[[LinkHandler], Links]
"""Function that connects this rank to all other ranks of its group for one epoch, and returns its links. The
argument is the handler of the messages that arrive. Blocks until all links are connected. Raises LinkBrokenError on
a timeout."""


def join_all(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Wait until all `threads` have ended, for at most `timeout_s` seconds in total. Return True if all have ended."""
    end_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(end_s - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in threads)
