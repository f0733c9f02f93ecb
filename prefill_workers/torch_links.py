"""Links between processes, over torch.distributed's gloo: point-to-point messages, no collective operations.

Implements the interfaces of `prefill_workers.links`; connected by `prefill_workers.servicer` when an epoch starts.
Headers are sent over gloo. Payloads follow them over gloo too, unless the ranks have communicators between their
devices (`prefill_workers.communicators`).

gloo uses a rendezvous protocol: a send reads its memory and completes only when the peer has called receive.
Between any two ranks there are two links, each with a sending thread on one side and a receiving thread on the other.
The receiving thread waits in a receive call even when no job runs, so every rank notices a dead peer immediately. A
wait that times out would close gloo's connection for good, so waits have no timeout; `prefill_workers.watchdog` limits
how long a peer may be silent.

A rank that closes its links sends CLOSE on every link. It continues to receive, into scratch memory, until its peers
have closed as well. So no send to a closed rank hangs, and all threads end. Only a stopped peer can block a thread. The
blocked thread is a daemon. It ends when the supervisor kills the peer, and its error is dropped.

For each communicator with a peer, a separate thread receives the payloads that the headers announce. So the thread that
receives headers never waits for a missing payload, and detects the peer's end immediately. When the links are closed,
the communicators are aborted. A further thread per communicator does this, because the abort may block. A flag is set
before the abort, so that later payloads are dropped. A rank whose communicator broke still sends CLOSE.

Each epoch has its own process group, which is not torch's default group. The ranks connect through a TCPStore in the
supervisor, which exists until all ranks are connected. The network interface is set explicitly.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from baton.errors import ChainError, LinkBrokenError
from baton.settings.addresses import host_of
from baton.types import JobId, Rank
from prefill_workers.communicators import (
    Communicator,
    CommunicatorBackend,
    Group,
    GroupCommunicator,
    Rendezvous,
    connect_communicators,
    gloo_group,
)
from prefill_workers.links import HEADER_BYTES, LinkHandler, LinkHeader, LinkStatus, Payload, join_all

logger = logging.getLogger(__name__)

_Message = tuple[LinkHeader, Payload | None]


def connect_torch_links(
    rendezvous: Rendezvous, handler: LinkHandler, backend: CommunicatorBackend | None = None
) -> "TorchLinks":
    """Join an epoch, i.e. connect to all other ranks of the group, and return the links. Blocks until all ranks have
    joined. Raises LinkBrokenError on a timeout.

    `backend` creates communicators for this rank's device; None: payloads are sent through host memory. Payloads are
    sent between devices only if the backends and devices of all ranks allow it.
    """
    lines: dict[Rank, Line] = {}
    try:
        if rendezvous.num_ranks > 1:
            store = _epoch_store(rendezvous)
            group = make_group(rendezvous, store)
            communicators = connect_communicators(store, rendezvous, backend)
            peers = (Rank(rank) for rank in range(rendezvous.num_ranks) if rank != rendezvous.rank)
            lines = {peer: Line(GroupCommunicator(group, peer), communicators.get(peer)) for peer in peers}
    except RuntimeError as error:  # torch's error for a store that has closed, and for missing peers
        raise LinkBrokenError(
            f"rank {rendezvous.rank} met not all {rendezvous.num_ranks} ranks of epoch {rendezvous.epoch} "
            f"at {rendezvous.store} within {rendezvous.timeout_s:g} s: start the next epoch with all ranks alive "
            f"({_one_line(error)})"
        ) from error
    return TorchLinks(rendezvous, lines, handler)


def make_group(rendezvous: Rendezvous, store: dist.Store | None = None) -> Group:
    """Return a new process group that is independent of torch's default group. `store` is the store through which the
    ranks connect; None: the store that `rendezvous` names. Blocks until all ranks have joined. Raises RuntimeError on a
    timeout."""
    store = store or _epoch_store(rendezvous)
    return gloo_group(store, rendezvous.rank, rendezvous.num_ranks, rendezvous.host, rendezvous.timeout_s)


def _epoch_store(rendezvous: Rendezvous) -> dist.Store:
    host, port = host_of(rendezvous.store), rendezvous.store.rpartition(":")[2]
    timeout = timedelta(seconds=rendezvous.timeout_s)
    store = dist.TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"epoch-{rendezvous.epoch}", store)


@dataclass(frozen=True)
class Line:
    """Connection between this rank and one other rank."""

    gloo: GroupCommunicator
    """Communicator over gloo for headers. It also carries payloads if `communicator` is None."""
    communicator: Communicator | None
    """Communicator for payloads between devices; None: payloads are sent over gloo."""

    @property
    def payloads(self) -> Communicator:
        """Return the communicator that carries payloads: `communicator`, or `gloo` if `communicator` is None."""
        return self.communicator or self.gloo


class TorchLinks:
    """Links over gloo. Implements `prefill_workers.links.Links`. The last link thread that ends drops the process
    groups."""

    def __init__(self, rendezvous: Rendezvous, lines: dict[Rank, Line], handler: LinkHandler) -> None:
        self.on_device = any(line.communicator is not None for line in lines.values())
        self._epoch = rendezvous.epoch
        self._rank = rendezvous.rank
        self._handler = handler
        self._closed = threading.Event()
        self._queueing = threading.Lock()
        self._queues: dict[Rank, SimpleQueue[_Message | None]] = {peer: SimpleQueue() for peer in lines}
        self._threads: list[threading.Thread] = []
        for peer, line in lines.items():
            inbox: SimpleQueue[LinkHeader | None] = SimpleQueue()
            self._add(peer, "to", partial(self._send_all, peer, line))
            self._add(peer, "from", partial(self._receive_all, peer, line, inbox))
            if line.communicator is not None:
                self._add(peer, "payloads-from", partial(self._take_all, peer, line.communicator, inbox))
                self._add(peer, "abort", partial(self._abort, line.communicator))
        for thread in self._threads:
            thread.start()

    def send(self, target: Rank, header: LinkHeader, payload: Payload | None) -> None:
        """Queue one message for the thread that sends to `target`. Drop the message if the links are closed."""
        assert header.num_bytes == (payload.nbytes if payload is not None else 0), header
        with self._queueing:
            if not self._closed.is_set():
                self._queues[target].put((header, payload))

    def close(self) -> None:
        """Close the links, and return immediately. Queued messages are dropped, and all peers are notified. May be
        called on any thread. Idempotent."""
        with self._queueing:
            if not self._closed.is_set():
                self._closed.set()
                for queue in self._queues.values():
                    with contextlib.suppress(Empty):
                        while True:
                            queue.get_nowait()
                    queue.put(None)

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until all link threads have ended, for at most `timeout_s` seconds. Return True if all have ended. Call
        it after `close`."""
        return join_all(self._threads, timeout_s)

    def _add(self, peer: Rank, way: str, work: Callable[[], None]) -> None:
        name = f"link-{self._rank}-{way}-{peer}"
        self._threads.append(threading.Thread(target=self._live, args=(work, peer), name=name, daemon=True))

    def _live(self, work: Callable[[], None], peer: Rank) -> None:
        """Run `work` to its end, as a link thread's main function; report its failure as a broken link."""
        try:
            work()
        except (RuntimeError, ChainError) as error:  # torch raises the former
            self._break(peer, error)
        except Exception as error:
            logger.exception("a link thread failed")
            self._break(peer, error)

    def _send_all(self, target: Rank, line: Line) -> None:
        try:
            self._send_messages(target, line)
        except RuntimeError as error:
            self._break(target, error)  # CLOSE follows: the peer must receive it if only a communicator broke
        line.gloo.send(_as_tensor(LinkHeader.bare(self._epoch, JobId(0), LinkStatus.CLOSE).pack()))

    def _send_messages(self, target: Rank, line: Line) -> None:
        queue = self._queues[target]
        while (message := queue.get()) is not None:
            header, payload = message
            line.gloo.send(_as_tensor(header.pack()))
            if payload is not None:
                line.payloads.send(_as_tensor(payload))
            del message, payload  # else this waiting thread would keep the message's memory
            if not self._closed.is_set():
                self._handler.sent(target, header)

    def _receive_all(self, source: Rank, line: Line, inbox: "SimpleQueue[LinkHeader | None]") -> None:
        header_bytes = bytearray(HEADER_BYTES)
        header_tensor = torch.frombuffer(header_bytes, dtype=torch.uint8)
        try:
            while True:
                line.gloo.receive(header_tensor)
                header = LinkHeader.unpack(bytes(header_bytes))
                if header.status is LinkStatus.CLOSE:
                    raise LinkBrokenError("the peer closed its links: its epoch has ended")
                if line.communicator is not None:
                    inbox.put(header)  # never many: the peer sends the next header after this payload
                else:
                    self._take(source, header, line.gloo)
        finally:
            inbox.put(None)

    def _take_all(self, source: Rank, communicator: Communicator, inbox: "SimpleQueue[LinkHeader | None]") -> None:
        while (header := inbox.get()) is not None:
            self._take(source, header, communicator)

    def _take(self, source: Rank, header: LinkHeader, payloads: Communicator) -> None:
        """Receive the payload that `header` announces, if any, and pass the message to the handler."""
        if header.num_bytes:
            place = None if self._closed.is_set() else self._handler.place_for(source, header)
            assert place is None or place.nbytes == header.num_bytes, header
            payloads.receive(payloads.empty(header.num_bytes) if place is None else _as_tensor(place))
        if not self._closed.is_set():  # set before a communicator is aborted, after which the bytes are arbitrary
            self._handler.received(source, header)

    def _abort(self, communicator: Communicator) -> None:
        self._closed.wait()
        communicator.abort()

    def _break(self, peer: Rank, error: Exception) -> None:
        if not self._closed.is_set():
            broken = LinkBrokenError(f"link between ranks {self._rank} and {peer} broke: {_one_line(error)}")
            broken.__cause__ = error
            self._handler.broken(broken)


def _as_tensor(data: Payload | bytes) -> Tensor:
    """Return a uint8 tensor that shares a payload's memory, or holds a copy of `bytes`."""
    if isinstance(data, Tensor):
        return data
    return torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8)


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:200]
