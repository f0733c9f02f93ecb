"""Measures how long a message from one rank to the next takes, over the links that a chain uses."""

import time
from dataclasses import dataclass
from queue import SimpleQueue

from baton.errors import ChainError
from baton.types import Epoch, JobId, Rank, TokenRange
from prefill_workers.links import ConnectLinks, LinkHeader, LinkStatus

Points = tuple[tuple[float, float], ...]
"""Measured messages, each as (bytes, seconds)."""


@dataclass(frozen=True)
class MessageSizes:
    """Sizes of the messages to measure, and the number of messages of each size."""

    num_bytes: tuple[int, ...]
    repeats: int
    """Number of measured messages of each size. One warm-up message precedes them."""


class LinkProbe:
    """Measures messages between ranks 0 and 1, which send to each other alternately. Each rank has one LinkProbe, whose
    links are used only for these messages. Implements LinkHandler."""

    def __init__(self, rank: int, epoch: Epoch, connect: ConnectLinks) -> None:
        """Connect this rank to the others with `connect`. `epoch` is the identifier of this set of connections. Blocks
        until all ranks are connected."""
        self._rank, self._epoch = rank, epoch
        self._came: SimpleQueue[ChainError | None] = SimpleQueue()
        self._place = memoryview(bytearray())
        self._links = connect(self)

    def times(self, sizes: MessageSizes) -> Points:
        """Send messages back and forth between ranks 0 and 1. On rank 0, return (bytes, one-way seconds) for each
        repeat of each size, where the one-way time is half of the round trip. On other ranks, return an empty tuple."""
        if self._rank > 1:
            return ()
        points = []
        for num_bytes in sizes.num_bytes:
            self._place = memoryview(bytearray(num_bytes))
            payload = memoryview(bytearray(num_bytes))
            for repeat in range(sizes.repeats + 1):
                seconds = self._throw(payload)
                if repeat and self._rank == 0:
                    points.append((float(num_bytes), seconds))
        return tuple(points)

    def close(self) -> None:
        """Close this rank's links, and wait until the other ranks have closed theirs."""
        self._links.close()
        self._links.wait_closed(1.0)

    def _throw(self, payload: memoryview) -> float:
        start_s = time.perf_counter()
        if self._rank == 0:
            self._send(Rank(1), payload)
            self._catch()
        else:
            self._catch()
            self._send(Rank(0), payload)
        return (time.perf_counter() - start_s) / 2

    def _send(self, target: Rank, payload: memoryview) -> None:
        header = LinkHeader(self._epoch, JobId(0), 0, TokenRange(0, 0), LinkStatus.DATA, payload.nbytes)
        self._links.send(target, header, payload)

    def _catch(self) -> None:
        if (error := self._came.get()) is not None:
            raise error

    def place_for(self, source: Rank, header: LinkHeader) -> memoryview | None:
        return self._place if self._place.nbytes == header.num_bytes else None

    def received(self, source: Rank, header: LinkHeader) -> None:
        self._came.put(None)

    def sent(self, target: Rank, header: LinkHeader) -> None:
        """Do nothing. The reply of the other rank shows that the message was sent."""

    def broken(self, error: ChainError) -> None:
        self._came.put(error)


def medians(points: Points) -> Points:
    """Return one point per message size: (bytes, median of the seconds of all messages of this size)."""
    sizes = sorted({num_bytes for num_bytes, _ in points})
    times = {size: sorted(seconds for num_bytes, seconds in points if num_bytes == size) for size in sizes}
    return tuple((size, found[len(found) // 2]) for size, found in times.items())
