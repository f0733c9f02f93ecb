"""Measures the duration of a message from one rank to the next, over the links that a chain uses."""

import time
from dataclasses import dataclass
from queue import SimpleQueue

from baton.errors import ChainError
from baton.types import Epoch, JobId, Rank, TokenRange
from prefill_workers.links import ConnectLinks, LinkHeader, LinkStatus

Points = tuple[tuple[float, float], ...]
"""(bytes, seconds) of single messages."""


@dataclass(frozen=True)
class MessageSizes:
    """Sizes and number of the messages to measure."""

    num_bytes: tuple[int, ...]
    repeats: int
    """Number of recorded messages per size, after one warm-up message."""


class LinkProbe:
    """One end of a link without other traffic; a LinkHandler. Ranks 0 and 1 alternately send messages to each other."""

    def __init__(self, rank: int, epoch: Epoch, connect: ConnectLinks) -> None:
        """Join the epoch with `connect`. Blocks until all ranks are connected."""
        self._rank, self._epoch = rank, epoch
        self._came: SimpleQueue[ChainError | None] = SimpleQueue()
        self._place = memoryview(bytearray())
        self._links = connect(self)

    def times(self, sizes: MessageSizes) -> Points:
        """Send messages back and forth. On rank 0, return (bytes, one-way seconds) for each repeat of each size, where
        one way is half of the round trip. On other ranks, return an empty tuple."""
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
        """Close this rank's links, and wait until those of the other ranks are closed."""
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
        """Do nothing: the reply shows that this message was sent."""

    def broken(self, error: ChainError) -> None:
        self._came.put(error)


def medians(points: Points) -> Points:
    """Return (bytes, median seconds) for each size."""
    sizes = sorted({num_bytes for num_bytes, _ in points})
    times = {size: sorted(seconds for num_bytes, seconds in points if num_bytes == size) for size in sizes}
    return tuple((size, found[len(found) // 2]) for size, found in times.items())
