"""Links between ranks inside one process, for tests. Threads replace torch.distributed.

Implements the ports of `prefill_workers.links`, and passes the same conformance tests as `prefill_workers.torch_links`.
Each link has a thread that delivers its messages with gloo's semantics: a message is sent only when its receiver has
provided a buffer for it, and its bytes are read then, not when `send` is called.
"""

import threading
from dataclasses import dataclass
from queue import SimpleQueue

from baton.errors import LinkBrokenError
from baton.types import Rank
from prefill_workers.links import ConnectLinks, LinkHandler, LinkHeader, Payload, join_all


@dataclass(frozen=True)
class _Message:
    header: LinkHeader
    payload: Payload | None


class InProcessHub:
    """Rendezvous of the ranks of one epoch. Each rank joins through `connect(rank)` on a separate thread."""

    def __init__(self, num_ranks: int, timeout_s: float = 10.0) -> None:
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._met = threading.Barrier(num_ranks)
        self._links: dict[Rank, InProcessLinks] = {}

    def connect(self, rank: Rank) -> ConnectLinks:
        """Return the function by which an engine joins the epoch as `rank`. Call it once per rank."""

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
    """Links within one process, with a queue and a thread per outgoing link. Implements
    `prefill_workers.links.Links`."""

    on_device = False

    def __init__(self, rank: Rank, handler: LinkHandler, peers: "dict[Rank, InProcessLinks]") -> None:
        self._rank = rank
        self._handler = handler
        self._peers = peers
        self._closed = threading.Event()
        self._queueing = threading.Lock()
        self._queues: dict[Rank, SimpleQueue[_Message | None]] = {}
        self._threads: list[threading.Thread] = []

    def start(self, targets: tuple[Rank, ...]) -> None:
        """Start to deliver messages to `targets`. Called once, when all ranks have joined the epoch."""
        for target in targets:
            self._queues[target] = SimpleQueue()
            name = f"link-{self._rank}-to-{target}"
            self._threads.append(threading.Thread(target=self._carry, args=(target,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def send(self, target: Rank, header: LinkHeader, payload: Payload | None) -> None:
        """Enqueue one message for the thread of the link to `target`. Drop the message if the links are closed."""
        assert header.num_bytes == (payload.nbytes if payload is not None else 0), header
        with self._queueing:
            if not self._closed.is_set():
                self._queues[target].put(_Message(header, payload))

    def close(self) -> None:
        """Stop the delivery of messages, notify all peers, and return at once. May be called repeatedly and from any
        thread."""
        with self._queueing:
            if not self._closed.is_set():
                self._closed.set()
                for queue in self._queues.values():
                    queue.put(None)

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until all link threads have ended after `close`. Return whether they ended within `timeout_s`
        seconds."""
        return join_all(self._threads, timeout_s)

    def _carry(self, target: Rank) -> None:
        peer = self._peers[target]
        while (message := self._queues[target].get()) is not None:
            header = message.header
            if not self._closed.is_set():
                peer.take(self._rank, header, message.payload)
            del message  # otherwise, this thread would hold the message's memory while it waits
            if not self._closed.is_set():
                self._handler.sent(target, header)
        peer.hear_close(self._rank)

    def take(self, source: Rank, header: LinkHeader, payload: Payload | None) -> None:
        """Receive one message from `source`; called on the thread of the link from that rank. Drop the message if this
        rank has closed its links."""
        if self._closed.is_set():
            return
        if payload is not None:
            place = self._handler.place_for(source, header)
            if place is not None:
                assert isinstance(place, memoryview) and isinstance(payload, memoryview)
                place[:] = payload
        if not self._closed.is_set():
            self._handler.received(source, header)

    def hear_close(self, source: Rank) -> None:
        """Report to the handler that rank `source` has closed its links, unless this rank has closed its own links."""
        if not self._closed.is_set():
            self._handler.broken(LinkBrokenError(f"rank {source} closed its links: its epoch has ended"))
