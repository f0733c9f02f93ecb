"""What passes between two ranks of a chain, and the port that passes it.

A link is a FIFO of messages from one rank to another. A message is a fixed 64-byte header and, for DATA, one payload:
the KV of one layer for some of a job's tokens, a piece (relay.py says which, and in what order). Tags tell nothing
apart: receivers take messages in the order in which they were sent, and each to its end. So a job that was given up is
no abandoned send; it goes on as an in-band ABORT, and a message that nobody wants is received into scratch memory.
Links live as long as an epoch: when one breaks, or any rank closes its own, all are replaced.

Steps 5 and 6 of a request's way (DESIGN.md, section 4). Implementations own their threads; see each.
"""

import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from baton.errors import ChainError
from baton.ids import Epoch, JobId, Rank
from baton.types import TokenRange

HEADER_BYTES = 64
_MAGIC = 0x4261746F6E4B5652  # "BatonKVR"
_FORMAT = struct.Struct("<8q")


class LinkStatus(IntEnum):
    """What a message says."""

    DATA = 0
    """KV of `tokens` in `layer`; the payload follows."""
    ABORT = 1
    """The sender gave the job up: no more of it will come."""
    ALIVE = 2
    """The sender works, on other jobs first, or prepares this one: have patience with it."""
    CLOSE = 3
    """The sender closed its links: the epoch is over. Made and read by links alone, never handed to a handler."""


@dataclass(frozen=True)
class LinkHeader:
    """The first part of every message: eight little-endian int64, the first a magic number."""

    epoch: Epoch
    job: JobId
    layer: int
    tokens: TokenRange
    status: LinkStatus
    num_bytes: int
    """Length of the payload; 0: none follows."""

    @classmethod
    def bare(cls, epoch: Epoch, job: JobId, status: LinkStatus) -> "LinkHeader":
        """The header of a message that is nothing else."""
        return cls(epoch, job, 0, TokenRange(0, 0), status, 0)

    def pack(self) -> bytes:
        """HEADER_BYTES bytes."""
        tokens = self.tokens
        return _FORMAT.pack(
            _MAGIC, self.epoch, self.job, self.layer, tokens.start, tokens.end, self.status, self.num_bytes
        )

    @classmethod
    def unpack(cls, data: bytes) -> "LinkHeader":
        """The inverse of `pack`; raises ChainError for anything that `pack` did not make."""
        magic, epoch, job, layer, start, end, status, num_bytes = _FORMAT.unpack(data)
        if magic != _MAGIC or not 0 <= start <= end or num_bytes < 0 or not 0 <= status <= LinkStatus.CLOSE:
            raise ChainError(f"a link carried no valid header ({data[:16].hex()}...): all ranks must run one version")
        return cls(Epoch(epoch), JobId(job), layer, TokenRange(start, end), LinkStatus(status), num_bytes)


class LinkHandler(Protocol):
    """What a rank does with messages. Called on link threads: one at a time for each link, links at the same time."""

    def place_for(self, source: Rank, header: LinkHeader) -> memoryview | None:
        """Where the payload goes: writable memory of `header.num_bytes` bytes that stays valid, or None to drop it.

        Asked once for every message with a payload, before the payload is received. May block, which holds up all that
        `source` sends; not beyond the end of the epoch.
        """
        ...

    def received(self, source: Rank, header: LinkHeader) -> None:
        """A message is in, its payload, if any, in place."""
        ...

    def sent(self, target: Rank, header: LinkHeader) -> None:
        """A message has left: its memory is no longer read."""
        ...

    def broken(self, error: ChainError) -> None:
        """A link of this rank is no more, and so all are; may be called for several. Not after `close`."""
        ...


class Links(Protocol):
    """One rank's links to all other ranks of its group, for one epoch."""

    def send(self, target: Rank, header: LinkHeader, payload: memoryview | None) -> None:
        """Enqueues one message and returns at once. `payload` must have `header.num_bytes` bytes and must not change
        until the handler's `sent`; None for a bare header. Messages to one target leave in the order of the calls.
        Thread-safe. After `close`, or on a broken link, the message is dropped."""
        ...

    def close(self) -> None:
        """Drops what is not yet being sent, tells all peers, and returns at once; peers see their links broken. The
        handler may still hear of a message that was under way, of nothing else. May be called again, from any
        thread."""
        ...

    def wait_closed(self, timeout_s: float) -> bool:
        """After `close`: waits until all link threads have ended, and says whether they have. They end when all peers
        have closed their links as well, or are dead; a stopped peer holds them until it is killed."""
        ...


ConnectLinks = Callable[[LinkHandler], Links]
"""Joins an epoch: blocks until this rank has met all others; raises LinkBrokenError when it does not in time."""


def join_all(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Waits up to `timeout_s` seconds in all until `threads` have ended, and says whether they have."""
    end_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(end_s - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in threads)
