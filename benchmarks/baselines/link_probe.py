"""How long does a message take from one rank to the next, over the links that a chain uses?"""

import time
from dataclasses import dataclass
from queue import SimpleQueue

from baton.errors import ChainError
from baton.ids import Epoch, JobId, Rank
from baton.types import TokenRange
from prefill_workers.links import ConnectLinks, LinkHeader, LinkStatus

Points = tuple[tuple[float, float], ...]
"""(bytes, seconds) each."""


@dataclass(frozen=True)
class MessageSizes:
    """What is to be timed."""

    num_bytes: tuple[int, ...]
    repeats: int
    """Of each size; an unrecorded one comes before."""


class LinkProbe:
    """One end of a link that has no other use; a LinkHandler. Ranks 0 and 1 throw messages to each other."""

    def __init__(self, rank: int, epoch: Epoch, connect: ConnectLinks) -> None:
        """Blocks until all ranks have met."""
        self._rank, self._epoch = rank, epoch
        self._came: SimpleQueue[ChainError | None] = SimpleQueue()
        self._place = memoryview(bytearray())
        self._links = connect(self)

    def times(self, sizes: MessageSizes) -> Points:
        """On rank 0 (bytes, seconds one way), every repeat of every size: half of there and back. Others: nothing."""
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
        """Ends the links; waits for those of the others."""
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
        """Nobody waits for that: what comes back says it too."""

    def broken(self, error: ChainError) -> None:
        self._came.put(error)


def medians(points: Points) -> Points:
    """The median of each size."""
    sizes = sorted({num_bytes for num_bytes, _ in points})
    times = {size: sorted(seconds for num_bytes, seconds in points if num_bytes == size) for size in sizes}
    return tuple((size, found[len(found) // 2]) for size, found in times.items())
