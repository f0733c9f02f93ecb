"""Links between processes, over torch.distributed's gloo: point-to-point messages, never a collective.

Implements the ports of `prefill_workers.links`; connected by `prefill_workers.servicer` when an epoch starts.

gloo is rendezvous: a send completes only when the peer has posted the receive, and reads the memory then. Between any
two ranks there are two links, each with a sending thread on one side and a receiving thread on the other, which always
has a receive posted. So every rank notices a dead peer at once, even when no job runs. A wait that times out would
close the pair for ever, so waits have no timeout; `prefill_workers.watchdog` limits how long a peer may be silent.

A rank that closes sends CLOSE on every link and goes on receiving, into scratch memory, until its peers have closed as
well. So no rank's send hangs on a rank that has closed, and all threads end. Only a stopped peer can hold a thread.
Such a thread, a daemon, is left behind until the supervisor kills the peer; then it ends, and its error is dropped.

The process group is an object of its own for each epoch, not torch's default group; the ranks meet at a TCPStore in
the supervisor, which is there until all of them have met. The interface is chosen explicitly.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from baton.errors import ChainError, LinkBrokenError
from baton.ids import Epoch, JobId, Rank
from prefill_workers.links import HEADER_BYTES, LinkHandler, LinkHeader, LinkStatus, join_all

logger = logging.getLogger(__name__)

_FOREVER = timedelta(days=365)
_TAG = 0

_Message = tuple[LinkHeader, memoryview | None]


class _Work(Protocol):
    def wait(self, timeout: timedelta) -> bool: ...


class _Group(Protocol):
    """The methods of ProcessGroupGloo that are used here; none is a collective."""

    def send(self, tensors: list[Tensor], target: int, tag: int) -> _Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work: ...


@dataclass(frozen=True)
class Meeting:
    """The place, time and rank at which a rank joins an epoch."""

    epoch: Epoch
    rank: Rank
    num_ranks: int
    store: str
    """host:port of the TCPStore at which the ranks meet."""
    host: str
    """Address of the interface that this rank's links use."""
    timeout_s: float
    """Seconds to wait for the other ranks."""


def connect_torch_links(meeting: Meeting, handler: LinkHandler) -> "TorchLinks":
    """Join an epoch and return its links. Blocks until all ranks have met; raises LinkBrokenError on a timeout."""
    try:
        group = make_group(meeting) if meeting.num_ranks > 1 else None
    except RuntimeError as error:  # torch's error for a store that is gone, and for peers that do not come
        raise LinkBrokenError(
            f"rank {meeting.rank} met not all {meeting.num_ranks} ranks of epoch {meeting.epoch} at {meeting.store} "
            f"within {meeting.timeout_s:g} s: start the next epoch with all ranks alive ({_one_line(error)})"
        ) from error
    return TorchLinks(meeting, group, handler)


def make_group(meeting: Meeting) -> _Group:
    """Make a process group of its own, not the global default. Blocks until all ranks have met; raises RuntimeError."""
    host, port = meeting.store.rsplit(":", 1)
    timeout = timedelta(seconds=meeting.timeout_s)
    # torch's stubs leave out gloo's options, and point-to-point on the group
    store = dist.TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)
    epoch_store = dist.PrefixStore(f"epoch-{meeting.epoch}", store)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.host)]
    options._timeout = timeout
    return cast(_Group, dist.ProcessGroupGloo(epoch_store, meeting.rank, meeting.num_ranks, options))


_Worker = Callable[[Rank, _Group], None]


class TorchLinks:
    """Implements `prefill_workers.links.Links` over gloo. The last link thread drops the process group."""

    def __init__(self, meeting: Meeting, group: _Group | None, handler: LinkHandler) -> None:
        self._epoch = meeting.epoch
        self._rank = meeting.rank
        self._handler = handler
        self._closed = threading.Event()
        self._queueing = threading.Lock()
        self._queues: dict[Rank, SimpleQueue[_Message | None]] = {}
        self._threads: list[threading.Thread] = []
        for peer in (Rank(r) for r in range(meeting.num_ranks) if r != meeting.rank):
            assert group is not None
            self._queues[peer] = SimpleQueue()
            for work, way in ((self._send_all, "to"), (self._receive_all, "from")):
                name = f"link-{self._rank}-{way}-{peer}"
                self._threads.append(
                    threading.Thread(target=self._live, args=(work, peer, group), name=name, daemon=True)
                )
        for thread in self._threads:
            thread.start()

    def send(self, target: Rank, header: LinkHeader, payload: memoryview | None) -> None:
        """Enqueue one message for the thread that sends to `target`; drop it once the links are closed."""
        assert header.num_bytes == (payload.nbytes if payload is not None else 0), header
        with self._queueing:
            if not self._closed.is_set():
                self._queues[target].put((header, payload))

    def close(self) -> None:
        """Drop messages that are not being sent yet, tell all peers and return at once; any thread, idempotent."""
        with self._queueing:
            if not self._closed.is_set():
                self._closed.set()
                for queue in self._queues.values():
                    with contextlib.suppress(Empty):
                        while True:
                            queue.get_nowait()
                    queue.put(None)

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait, after `close`, until all link threads have ended, and return whether they have."""
        return join_all(self._threads, timeout_s)

    def _live(self, work: _Worker, peer: Rank, group: _Group) -> None:
        """Run `work` to its end, as a link thread's main function; report its failure as a broken link."""
        try:
            work(peer, group)
        except (RuntimeError, ChainError) as error:  # gloo raises the former
            self._break(peer, error)
        except Exception as error:
            logger.exception("a link thread failed")
            self._break(peer, error)

    def _send_all(self, target: Rank, group: _Group) -> None:
        queue = self._queues[target]
        while (message := queue.get()) is not None:
            header, payload = message
            _send(group, target, header, payload)
            del message, payload  # else this waiting thread would keep the message's memory
            if not self._closed.is_set():
                self._handler.sent(target, header)
        _send(group, target, LinkHeader.bare(self._epoch, JobId(0), LinkStatus.CLOSE), None)

    def _receive_all(self, source: Rank, group: _Group) -> None:
        header_bytes = bytearray(HEADER_BYTES)
        header_tensor = torch.frombuffer(header_bytes, dtype=torch.uint8)
        while True:
            group.recv([header_tensor], source, _TAG).wait(_FOREVER)
            header = LinkHeader.unpack(bytes(header_bytes))
            if header.status is LinkStatus.CLOSE:
                raise LinkBrokenError("the peer closed its links: its epoch has ended")
            if header.num_bytes:
                group.recv([self._place(source, header)], source, _TAG).wait(_FOREVER)
            if not self._closed.is_set():
                self._handler.received(source, header)

    def _place(self, source: Rank, header: LinkHeader) -> Tensor:
        place = None if self._closed.is_set() else self._handler.place_for(source, header)
        if place is None:
            return torch.empty(header.num_bytes, dtype=torch.uint8)
        assert place.nbytes == header.num_bytes, (place.nbytes, header)
        return torch.frombuffer(place, dtype=torch.uint8)

    def _break(self, peer: Rank, error: Exception) -> None:
        if not self._closed.is_set():
            broken = LinkBrokenError(f"link between ranks {self._rank} and {peer} broke: {_one_line(error)}")
            broken.__cause__ = error
            self._handler.broken(broken)


def _send(group: _Group, target: Rank, header: LinkHeader, payload: memoryview | None) -> None:
    parts = [memoryview(bytearray(header.pack()))] + ([payload] if payload is not None else [])
    for part in parts:
        group.send([torch.frombuffer(part, dtype=torch.uint8)], target, _TAG).wait(_FOREVER)


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:200]
