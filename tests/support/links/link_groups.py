"""Groups of linked ranks inside one process, with either implementation of links, and a handler that records all
events."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import TCPStore

from baton.errors import ChainError
from baton.types import Epoch, JobId, Rank
from prefill_workers.communicators import CommunicatorBackend, Rendezvous
from prefill_workers.links import ConnectLinks, LinkHandler, LinkHeader, Links, LinkStatus
from prefill_workers.torch_links import connect_torch_links
from tests.support.links.device_communicators import GlooBackend
from tests.support.links.in_process_links import InProcessHub

HOST = "127.0.0.1"
_WAIT_S = 20.0

MakeConnect = Callable[[int], list[ConnectLinks]]
"""Function that takes the number of ranks of a new epoch, and returns one function per rank by which the rank joins the
epoch."""


class Recorder:
    """LinkHandler that records all events. While `gate` is not set, place_for waits."""

    def __init__(self) -> None:
        self.received_messages: list[tuple[Rank, LinkHeader, bytes]] = []
        self.sent_messages: list[tuple[Rank, LinkHeader]] = []
        self.errors: list[ChainError] = []
        self.places: dict[JobId, memoryview] = {}
        self.unwanted: set[JobId] = set()
        self.num_places_asked = 0
        self.asked = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self._scratch: dict[Rank, memoryview | None] = {}
        self._changed = threading.Condition()

    @property
    def statuses(self) -> list[LinkStatus]:
        """Return the statuses of all received messages."""
        return [header.status for _, header, _ in self.received_messages]

    def place_for(self, source: Rank, header: LinkHeader) -> memoryview | None:
        self.num_places_asked += 1
        self.asked.set()
        assert self.gate.wait(_WAIT_S), "the test left the gate closed"
        place = None
        if header.job not in self.unwanted:
            place = self.places.get(header.job, memoryview(bytearray(header.num_bytes)))
        self._scratch[source] = place
        return place

    def received(self, source: Rank, header: LinkHeader) -> None:
        place = self._scratch.pop(source, None)
        with self._changed:
            self.received_messages.append((source, header, bytes(place) if place is not None else b""))
            self._changed.notify_all()

    def sent(self, target: Rank, header: LinkHeader) -> None:
        with self._changed:
            self.sent_messages.append((target, header))
            self._changed.notify_all()

    def broken(self, error: ChainError) -> None:
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()

    def wait_received(self, count: int) -> list[tuple[Rank, LinkHeader, bytes]]:
        self._wait(self.received_messages, count)
        return list(self.received_messages)

    def wait_sent(self, count: int) -> list[tuple[Rank, LinkHeader]]:
        self._wait(self.sent_messages, count)
        return list(self.sent_messages)

    def wait_broken(self) -> ChainError:
        self._wait(self.errors, 1)
        return self.errors[0]

    def _wait(self, events: Sequence[object], count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(events) >= count, _WAIT_S), f"{len(events)} of {count} came"


def in_process_connects(num_ranks: int, timeout_s: float = _WAIT_S) -> list[ConnectLinks]:
    """Return the functions by which ranks join a new epoch of in-process links."""
    hub = InProcessHub(num_ranks, timeout_s)
    return [hub.connect(Rank(rank)) for rank in range(num_ranks)]


_epochs = itertools.count(1)


def torch_connects(
    num_ranks: int, timeout_s: float = _WAIT_S, backends: Sequence[CommunicatorBackend | None] = ()
) -> list[ConnectLinks]:
    """Return the functions by which ranks of this process join a new epoch of gloo links, with a separate store.
    `backends`: communicator backends by rank."""
    store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
    epoch = Epoch(next(_epochs))

    def connect(rank: int) -> ConnectLinks:
        def join(handler: LinkHandler) -> Links:
            rendezvous = Rendezvous(epoch, Rank(rank), num_ranks, f"{HOST}:{store.port}", HOST, timeout_s)
            backend = backends[rank] if backends else None
            return connect_torch_links(rendezvous, handler, backend)  # keeps `store` alive until all ranks have joined

        return join

    return [connect(rank) for rank in range(num_ranks)]


def communicator_connects(num_ranks: int, timeout_s: float = _WAIT_S) -> list[ConnectLinks]:
    """Return the functions by which ranks join a new epoch of gloo links with communicators between devices. Each rank
    has its own backend."""
    return torch_connects(num_ranks, timeout_s, [GlooBackend(f"device-{rank}") for rank in range(num_ranks)])


def in_process_group(
    num_ranks: int, absent: Rank | None = None, timeout_s: float = _WAIT_S
) -> tuple[list[Links], list[Recorder]]:
    """Return links and recorders of the ranks of a new epoch."""
    return meet(in_process_connects(num_ranks, timeout_s), absent)


def torch_group(
    num_ranks: int, absent: Rank | None = None, timeout_s: float = _WAIT_S
) -> tuple[list[Links], list[Recorder]]:
    """Return links and recorders of the ranks of a new epoch."""
    return meet(torch_connects(num_ranks, timeout_s), absent)


def communicator_group(
    num_ranks: int, absent: Rank | None = None, timeout_s: float = _WAIT_S
) -> tuple[list[Links], list[Recorder]]:
    """Return links and recorders of the ranks of a new epoch."""
    return meet(communicator_connects(num_ranks, timeout_s), absent)


def meet(connects: list[ConnectLinks], absent: Rank | None = None) -> tuple[list[Links], list[Recorder]]:
    """Join an epoch with all ranks except `absent`. Return their links and recorders."""
    present = [connect for rank, connect in enumerate(connects) if rank != absent]
    recorders = [Recorder() for _ in present]
    handlers: list[LinkHandler] = list(recorders)
    with ThreadPoolExecutor(len(connects)) as pool:
        links = list(pool.map(lambda connect, handler: connect(handler), present, handlers))
    return links, recorders
