"""Links between ranks that live in one process: for tests, and for a chain without torch.distributed.

One thread a link carries its messages, with the semantics that gloo has: a message leaves only when its receiver has a
place for it, and the bytes are read then, not when `send` was called. Passes the same conformance suite as torch_links.
"""

import threading
from dataclasses import dataclass
from queue import SimpleQueue

from baton.errors import LinkBrokenError
from baton.ids import Rank
from prefill_workers.links import ConnectLinks, LinkHandler, LinkHeader, join_all


@dataclass(frozen=True)
class _Message:
    header: LinkHeader
    payload: memoryview | None


class InProcessHub:
    """Where the ranks of one epoch meet: `connect(rank)` on every rank, each on a thread of its own."""

    def __init__(self, num_ranks: int, timeout_s: float = 10.0) -> None:
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._met = threading.Barrier(num_ranks)
        self._links: dict[Rank, InProcessLinks] = {}

    def connect(self, rank: Rank) -> ConnectLinks:
        """What an engine calls to join as `rank`; once for each rank."""

        def join(handler: LinkHandler) -> "InProcessLinks":
            links = self._links[rank] = InProcessLinks(rank, handler, self._links)
            try:
                self._met.wait(self._timeout_s)
            except threading.BrokenBarrierError as error:
                raise LinkBrokenError(f"rank {rank} met not all {self.num_ranks} ranks: start the others") from error
            links.start(tuple(Rank(r) for r in range(self.num_ranks) if r != rank))
            return links

        return join


class InProcessLinks:
    """See `prefill_workers.links.Links`. Each outgoing link has a queue and a thread."""

    def __init__(self, rank: Rank, handler: LinkHandler, peers: "dict[Rank, InProcessLinks]") -> None:
        self._rank = rank
        self._handler = handler
        self._peers = peers
        self._closed = threading.Event()
        self._queueing = threading.Lock()
        self._queues: dict[Rank, SimpleQueue[_Message | None]] = {}
        self._threads: list[threading.Thread] = []

    def start(self, targets: tuple[Rank, ...]) -> None:
        """Begins to carry messages to `targets`; called once, when all ranks have met."""
        for target in targets:
            self._queues[target] = SimpleQueue()
            name = f"link-{self._rank}-to-{target}"
            self._threads.append(threading.Thread(target=self._carry, args=(target,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def send(self, target: Rank, header: LinkHeader, payload: memoryview | None) -> None:
        assert header.num_bytes == (payload.nbytes if payload is not None else 0), header
        with self._queueing:
            if not self._closed.is_set():
                self._queues[target].put(_Message(header, payload))

    def close(self) -> None:
        with self._queueing:
            if not self._closed.is_set():
                self._closed.set()
                for queue in self._queues.values():
                    queue.put(None)

    def wait_closed(self, timeout_s: float) -> bool:
        return join_all(self._threads, timeout_s)

    def _carry(self, target: Rank) -> None:
        peer = self._peers[target]
        while (message := self._queues[target].get()) is not None:
            header = message.header
            if not self._closed.is_set():
                peer.take(self._rank, header, message.payload)
            del message  # its memory may be given back while this thread waits
            if not self._closed.is_set():
                self._handler.sent(target, header)
        peer.hear_close(self._rank)

    def take(self, source: Rank, header: LinkHeader, payload: memoryview | None) -> None:
        """Receives one message from `source`, on its thread; a rank that has closed drops it."""
        if self._closed.is_set():
            return
        if payload is not None:
            place = self._handler.place_for(source, header)
            if place is not None:
                place[:] = payload
        if not self._closed.is_set():
            self._handler.received(source, header)

    def hear_close(self, source: Rank) -> None:
        """`source` has closed its links."""
        if not self._closed.is_set():
            self._handler.broken(LinkBrokenError(f"rank {source} closed its links: its epoch has ended"))
