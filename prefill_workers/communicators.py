"""Communicators that carry KV between two ranks, and the ranks' choice between host memory and device memory for them.

Headers always travel by gloo (`prefill_workers.torch_links`). A payload follows its header on the communicator of the
two ranks, and there are two kinds:

    host memory     the same gloo pair as the headers'; a device's KV is staged in pinned memory (`device_kv`)
    device memory   a communicator of the two ranks alone, made by a CommunicatorBackend: NCCL's

A rank passes on the KV that it receives, so all of its communicators have to carry the same memory. Hence all
communicators of a group are of one kind. The ranks choose it in each epoch, when they meet: each rank writes its offer
to the store, reads the offers of all others, and applies the same rule. On communicators between devices a header
announces exactly one payload, so that both sides call the communicator in one order.

The NCCL communicators were written against torch's and NCCL's documentation and sources, and have not been run yet:
that needs a machine with two GPUs (tests/cuda/test_chain.py). So their code is small, and the code around it is tested
with communicators of gloo. They rely on these facts:

- Each communicator is a ProcessGroupNCCL of two ranks, and so a communicator of its own: NCCL ignores tags, and runs
the
  operations of a communicator in the order of the calls, which the headers before them fix.
- torch's watchdog ends the process when a peer fails. TORCH_NCCL_BLOCKING_WAIT keeps torch from starting it. It would
  also turn Work.wait into a poll, so the code waits for a stream instead.
- An operation that the peer does not join never ends by itself, even when the peer is dead. `abort` ends it.
  `torch_links` calls `abort` when the epoch ends: when a link breaks, at silence beyond the watchdog's limit, or at a
  close.
- NCCL refuses two ranks on one GPU: `refusal` keeps such groups in host memory.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from datetime import timedelta
from itertools import combinations
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from baton.errors import ChainError
from baton.modeling.device.port import Device
from baton.types import Epoch, Rank

logger = logging.getLogger(__name__)

FOREVER = timedelta(days=365)
_TAG = 0
_SEPARATOR = "\n"


@dataclass(frozen=True)
class Rendezvous:
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


class Group(Protocol):
    """The methods of torch's process groups that are used here; none is a collective."""

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work: ...

    def abort(self) -> None: ...


class Communicator(Protocol):
    """Payloads between this rank and one other, in order in each direction. Chains send to higher ranks only, so a
    backend whose communicator runs one operation at a time does not have to carry both directions at once."""

    def empty(self, num_bytes: int) -> Tensor:
        """Return new memory that the communicator can receive into, uint8."""
        ...

    def send(self, payload: Tensor) -> None:
        """Send uint8, and return when the memory is no longer read. Blocks. Raises RuntimeError once it is broken."""
        ...

    def receive(self, place: Tensor) -> None:
        """Receive into a uint8 tensor of the payload's size, and return when all bytes have arrived. Blocks. Raises
        RuntimeError when the communicator is broken. After `abort` it may return with arbitrary bytes."""
        ...

    def abort(self) -> None:
        """Make blocked calls return or raise in bounded time, regardless of the peer. If the backend cannot do that,
        they end with the peer. Any thread. The communicator carries no payloads afterwards."""
        ...


class CommunicatorBackend(Protocol):
    """Makes communicators between devices."""

    @property
    def kind(self) -> str:
        """Return the backend's name and version. It connects only ranks with the same kind."""

    @property
    def device_id(self) -> str:
        """Return the identity of this rank's device among all devices of all hosts."""

    def connect(self, store: dist.Store, place: int, timeout_s: float) -> Communicator:
        """Return two ranks' communicator. Both call this with an equal store that no other pair uses, one as place 0
        and one as 1. Blocks until both have called; raises RuntimeError when they have not within `timeout_s`."""
        ...


class GroupCommunicator:
    """An Edge over a process group of gloo's kind, whose waits end when the operation has, or the peer."""

    def __init__(self, group: Group, peer: int) -> None:
        self._group, self._peer = group, peer

    def empty(self, num_bytes: int) -> Tensor:
        """Return new memory of the host."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, payload: Tensor) -> None:
        """Send, and wait until the peer has taken all of it."""
        self._group.send([payload], self._peer, _TAG).wait(FOREVER)

    def receive(self, place: Tensor) -> None:
        """Receive, and wait until all bytes have arrived."""
        self._group.recv([place], self._peer, _TAG).wait(FOREVER)

    def abort(self) -> None:
        """Do nothing: gloo's waits end with the peer, which receives and drops later payloads once it has closed."""


def gloo_group(store: dist.Store, rank: int, num_ranks: int, host: str, timeout_s: float) -> Group:
    """Make a gloo group, separate from torch's default one, over the interface `host`. Blocks until all ranks have met;
    raises RuntimeError on a timeout."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return cast(Group, dist.ProcessGroupGloo(store, rank, num_ranks, options))


@dataclass(frozen=True)
class Offer:
    """Offer of one rank: its backend's kind and its device's identity; both empty without a backend."""

    kind: str = ""
    device_id: str = ""

    @classmethod
    def of(cls, backend: CommunicatorBackend | None) -> "Offer":
        """Return the offer of a rank with that backend."""
        return cls(backend.kind, backend.device_id) if backend is not None else cls()


def refusal(offers: Sequence[Offer]) -> str:
    """Return why payloads of a group with these offers, by rank, go through host memory; empty if they do not."""
    for rank, offer in enumerate(offers):
        if not offer.kind:
            return f"rank {rank} has no communicator for device memory"
        if offer.kind != offers[0].kind:
            return f"ranks 0 and {rank} have {offers[0].kind} and {offer.kind}"
    for first, second in combinations(range(len(offers)), 2):
        if offers[first].device_id == offers[second].device_id:
            return f"ranks {first} and {second} share a device"
    return ""


def connect_communicators(
    store: dist.Store, rendezvous: Rendezvous, backend: CommunicatorBackend | None
) -> dict[Rank, Communicator]:
    """Return communicators of this rank's device by peer; empty where payloads go through host memory. All ranks of the
    epoch call this, with equal stores. Blocks until all have called; raises RuntimeError when they have not in time."""
    offers = _exchange(store, rendezvous, Offer.of(backend))
    why = refusal(offers)
    how = f"through host memory, by gloo: {why}" if why else f"between device memories, by {offers[0].kind}"
    logger.info(
        "epoch %d, rank %d: KV of %d ranks travels %s", rendezvous.epoch, rendezvous.rank, rendezvous.num_ranks, how
    )
    if why or backend is None:
        return {}
    made: Future[dict[Rank, Communicator]] = Future()
    args = (made, store, rendezvous, backend)
    # a backend may have no timeout of its own: a thread that a stopped peer holds is left behind until that is killed
    threading.Thread(target=_connect_all, args=args, name=f"link-{rendezvous.rank}-meet", daemon=True).start()
    try:
        return made.result(rendezvous.timeout_s)
    except TimeoutError as error:
        raise RuntimeError(
            f"not all communicators by {backend.kind} were made within {rendezvous.timeout_s:g} s"
        ) from error


def _exchange(store: dist.Store, rendezvous: Rendezvous, own: Offer) -> list[Offer]:
    """Return the offers of all ranks, by rank."""
    store.set(f"offer-{rendezvous.rank}", _SEPARATOR.join(astuple(own)))
    texts = [bytes(store.get(f"offer-{rank}")).decode() for rank in range(rendezvous.num_ranks)]
    return [Offer(*text.split(_SEPARATOR)) for text in texts]


def _connect_all(
    made: "Future[dict[Rank, Communicator]]", store: dist.Store, rendezvous: Rendezvous, backend: CommunicatorBackend
) -> None:
    """Make all communicators of a rank, one by one in an order that all ranks share, so that waits form no circle."""
    communicators: dict[Rank, Communicator] = {}
    try:
        for pair in combinations(map(Rank, range(rendezvous.num_ranks)), 2):
            if rendezvous.rank in pair:
                place = pair.index(rendezvous.rank)
                communicator_store = dist.PrefixStore(f"communicator-{pair[0]}-{pair[1]}", store)
                communicators[pair[1 - place]] = communicator = backend.connect(
                    communicator_store, place, rendezvous.timeout_s
                )
                _greet(communicator, place, rendezvous.epoch)
    except Exception as error:  # noqa: BLE001 - the meeting thread raises it
        for communicator in communicators.values():
            communicator.abort()
        made.set_exception(error)
    else:
        made.set_result(communicators)


def _greet(communicator: Communicator, place: int, epoch: Epoch) -> None:
    """Send the epoch's number to the higher rank, because communicators are made at first use and need the store."""
    greeting = torch.frombuffer(bytearray(epoch.to_bytes(8, "little")), dtype=torch.uint8)
    memory = communicator.empty(len(greeting))
    if place == 0:
        communicator.send(memory.copy_(greeting))
        return
    communicator.receive(memory)
    if not torch.equal(memory.cpu(), greeting):
        raise ChainError(f"a communicator of epoch {epoch} carried {memory.tolist()}: all ranks must run one version")


class NcclCommunicator(GroupCommunicator):
    """An Edge between two GPUs; the module's docstring has the facts that it relies on."""

    def __init__(self, group: Group, peer: int, device: torch.device) -> None:
        super().__init__(group, peer)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def empty(self, num_bytes: int) -> Tensor:
        """Return new memory of the GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, payload: Tensor) -> None:
        """Send, and wait for the stream, without the GIL. The payload's computation must have ended."""
        self._run(lambda: self._group.send([payload], self._peer, 0))

    def receive(self, place: Tensor) -> None:
        """Receive, and wait for the stream, without the GIL. Earlier reads of the place must have ended."""
        self._run(lambda: self._group.recv([place], self._peer, 0))

    def abort(self) -> None:
        """Abort the communicator, which ends kernels that wait for the peer. Blocks for at most the timeout of the
        ranks' meeting."""
        self._group.abort()

    def _run(self, begin: Callable[[], dist.Work]) -> None:
        with torch.cuda.stream(self._stream):
            begin().synchronize()  # the stream waits for the operation, not this thread
        self._stream.synchronize()


class NcclBackend:
    """Makes NCCL communicators of one GPU. Implements CommunicatorBackend."""

    def __init__(self, device: torch.device) -> None:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        self.kind = f"nccl {version}"
        self.device_id = str(torch.cuda.get_device_properties(device).uuid)
        self._device = device
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # noqa: TID251 - torch takes it from nowhere else

    def connect(self, store: dist.Store, place: int, timeout_s: float) -> Communicator:
        """Make the process group. NCCL initializes it at the first message. The timeout applies to `abort` only."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        group = dist.ProcessGroupNCCL(store, place, 2, options)
        return NcclCommunicator(cast(Group, group), 1 - place, self._device)


def backend_of(device: Device) -> CommunicatorBackend | None:
    """Return the backend for KV in that device's memory; None where gloo carries it, through host memory."""
    is_gpu = device.torch_device.type == "cuda" and dist.is_nccl_available()
    return NcclBackend(device.torch_device) if is_gpu else None
