"""Communicators that transfer KV between two ranks, and the choice between host memory and device memory for the KV.

Headers always travel by gloo (`prefill_workers.torch_links`). A payload follows its header on the communicator of the
two ranks. There are two kinds:

    host memory     the gloo pair that also carries the headers; a device's KV is staged in pinned memory (`device_kv`)
    device memory   a communicator of these two ranks only, made by a CommunicatorBackend (NCCL)

A rank passes on the KV that it receives, so all of its communicators must use the same kind of memory. Hence all
communicators of a group are of one kind. The ranks choose the kind at the start of each epoch: each rank writes its
offer (its backend and device) to the store, reads the offers of all other ranks, and applies the same rule. On
communicators between devices a header announces exactly one payload, so that both sides call the communicator in the
same order.

The NCCL communicators were written against torch's and NCCL's documentation and sources, and have not been run yet:
that needs a machine with two GPUs (tests/cuda/test_chain.py). So their code is small, and the code around it is tested
with gloo communicators. They rely on these facts:

- Each communicator is a separate ProcessGroupNCCL of two ranks. NCCL ignores tags and runs the operations of a
  communicator in the order of the calls. The headers, which are sent first, determine this order.
- torch's watchdog ends the process when a peer fails. TORCH_NCCL_BLOCKING_WAIT keeps torch from starting the watchdog.
  This variable would also turn Work.wait into a poll, so the code waits for a stream instead.
- An operation that the peer does not join never ends by itself, even when the peer is dead. `abort` ends it.
  `torch_links` calls `abort` when the epoch ends: when a link breaks, when a peer is silent for longer than the
  watchdog's limit, or when the links are closed.
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
    """Parameters with which a rank joins an epoch: store, interface, rank and timeout."""

    epoch: Epoch
    rank: Rank
    num_ranks: int
    store: str
    """Address (host:port) of the TCPStore through which the ranks connect to each other."""
    host: str
    """Address of the network interface that this rank's links use."""
    timeout_s: float
    """Seconds to wait for the other ranks."""


class Group(Protocol):
    """Protocol with the methods of torch's process groups that this module uses; none is a collective operation."""

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work: ...

    def abort(self) -> None: ...


class Communicator(Protocol):
    """Transfers payloads between this rank and one other rank, in order in each direction. Chains send to higher ranks
    only, so a communicator may run one operation at a time: it never has to send and receive at once."""

    def empty(self, num_bytes: int) -> Tensor:
        """Return a new uint8 tensor of `num_bytes` bytes into which the communicator can receive."""
        ...

    def send(self, payload: Tensor) -> None:
        """Send a uint8 tensor, and block until its memory is no longer read. Raises RuntimeError if the communicator is
        broken."""
        ...

    def receive(self, place: Tensor) -> None:
        """Receive into a uint8 tensor of the payload's size, and block until all bytes have arrived. Raises
        RuntimeError if the communicator is broken. After `abort`, the call may return although the bytes are
        arbitrary."""
        ...

    def abort(self) -> None:
        """Make blocked calls return or raise in bounded time, regardless of the peer. If the backend cannot do that,
        the calls end when the peer's process ends. May be called on any thread. The communicator cannot be used
        afterwards."""
        ...


class CommunicatorBackend(Protocol):
    """Factory of communicators between the devices of two ranks."""

    @property
    def kind(self) -> str:
        """Return the backend's name and version. Only ranks with the same name and version can be connected."""

    @property
    def device_id(self) -> str:
        """Return the identity of this rank's device among all devices of all hosts."""

    def connect(self, store: dist.Store, place: int, timeout_s: float) -> Communicator:
        """Return a communicator between two ranks. Both ranks call this with the same store, which no other pair of
        ranks uses: the lower rank with `place` 0, the higher with 1. Blocks until both ranks have called; raises
        RuntimeError after `timeout_s`."""
        ...


class GroupCommunicator:
    """Communicator over a gloo process group. A wait ends when the operation ends or the peer's process does."""

    def __init__(self, group: Group, peer: int) -> None:
        self._group, self._peer = group, peer

    def empty(self, num_bytes: int) -> Tensor:
        """Return new host memory of `num_bytes` bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, payload: Tensor) -> None:
        """Send, and wait until the peer has received the whole payload."""
        self._group.send([payload], self._peer, _TAG).wait(FOREVER)

    def receive(self, place: Tensor) -> None:
        """Receive, and wait until all bytes have arrived."""
        self._group.recv([place], self._peer, _TAG).wait(FOREVER)

    def abort(self) -> None:
        """Do nothing. gloo's waits end with the peer: a peer that has closed still receives payloads and drops them."""


def gloo_group(store: dist.Store, rank: int, num_ranks: int, host: str, timeout_s: float) -> Group:
    """Return a new gloo group, separate from torch's default group, over the interface `host`. Blocks until all ranks
    have joined; raises RuntimeError on a timeout."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return cast(Group, dist.ProcessGroupGloo(store, rank, num_ranks, options))


@dataclass(frozen=True)
class Offer:
    """One rank's offer to the other ranks: the kind of its backend and the identity of its device. Both are empty if
    the rank has no backend."""

    kind: str = ""
    device_id: str = ""

    @classmethod
    def of(cls, backend: CommunicatorBackend | None) -> "Offer":
        """Return the offer of a rank that has this backend."""
        return cls(backend.kind, backend.device_id) if backend is not None else cls()


def refusal(offers: Sequence[Offer]) -> str:
    """Return the reason why a group with these offers, in rank order, must send payloads through host memory; an empty
    string if it can send them between devices."""
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
    """Return the communicators between this rank's device and each peer's, by peer; an empty dict if payloads go
    through host memory. All ranks of the epoch must call this, with the same store. Blocks until all ranks have called;
    raises RuntimeError on a timeout."""
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
    # a backend may have no timeout: if a peer is stopped, this thread stays blocked until the peer is killed
    threading.Thread(target=_connect_all, args=args, name=f"link-{rendezvous.rank}-meet", daemon=True).start()
    try:
        return made.result(rendezvous.timeout_s)
    except TimeoutError as error:
        raise RuntimeError(
            f"not all communicators by {backend.kind} were made within {rendezvous.timeout_s:g} s"
        ) from error


def _exchange(store: dist.Store, rendezvous: Rendezvous, own: Offer) -> list[Offer]:
    """Publish this rank's offer, and return the offers of all ranks, in rank order."""
    store.set(f"offer-{rendezvous.rank}", _SEPARATOR.join(astuple(own)))
    texts = [bytes(store.get(f"offer-{rank}")).decode() for rank in range(rendezvous.num_ranks)]
    return [Offer(*text.split(_SEPARATOR)) for text in texts]


def _connect_all(
    made: "Future[dict[Rank, Communicator]]", store: dist.Store, rendezvous: Rendezvous, backend: CommunicatorBackend
) -> None:
    """Make all communicators of a rank, one by one. All ranks use the same order, so that no cycle of waits can
    form."""
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
    except Exception as error:  # noqa: BLE001 - the thread that reads `made` raises it
        for communicator in communicators.values():
            communicator.abort()
        made.set_exception(error)
    else:
        made.set_result(communicators)


def _greet(communicator: Communicator, place: int, epoch: Epoch) -> None:
    """Send the epoch's number to the higher rank, which checks it. The first message initializes a communicator, and
    needs the store."""
    greeting = torch.frombuffer(bytearray(epoch.to_bytes(8, "little")), dtype=torch.uint8)
    memory = communicator.empty(len(greeting))
    if place == 0:
        communicator.send(memory.copy_(greeting))
        return
    communicator.receive(memory)
    if not torch.equal(memory.cpu(), greeting):
        raise ChainError(f"a communicator of epoch {epoch} carried {memory.tolist()}: all ranks must run one version")


class NcclCommunicator(GroupCommunicator):
    """NCCL communicator between two GPUs. The module's docstring lists the facts that it relies on."""

    def __init__(self, group: Group, peer: int, device: torch.device) -> None:
        super().__init__(group, peer)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def empty(self, num_bytes: int) -> Tensor:
        """Return new GPU memory of `num_bytes` bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, payload: Tensor) -> None:
        """Send on the communicator's stream, and wait for the stream with the GIL released. The computation of the
        payload must have ended."""
        self._run(lambda: self._group.send([payload], self._peer, 0))

    def receive(self, place: Tensor) -> None:
        """Receive on the communicator's stream, and wait for the stream with the GIL released. Earlier reads of `place`
        must have ended."""
        self._run(lambda: self._group.recv([place], self._peer, 0))

    def abort(self) -> None:
        """Abort the communicator, which ends kernels that wait for the peer. Blocks for at most the rendezvous
        timeout."""
        self._group.abort()

    def _run(self, begin: Callable[[], dist.Work]) -> None:
        with torch.cuda.stream(self._stream):
            begin().synchronize()  # the stream waits for the operation, not this thread
        self._stream.synchronize()


class NcclBackend:
    """Factory of NCCL communicators for one GPU. Implements CommunicatorBackend."""

    def __init__(self, device: torch.device) -> None:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        self.kind = f"nccl {version}"
        self.device_id = str(torch.cuda.get_device_properties(device).uuid)
        self._device = device
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # noqa: TID251 - torch reads this setting only here

    def connect(self, store: dist.Store, place: int, timeout_s: float) -> Communicator:
        """Make a process group of the two ranks, which NCCL initializes at the first message. The timeout applies to
        `abort` only."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        group = dist.ProcessGroupNCCL(store, place, 2, options)
        return NcclCommunicator(cast(Group, group), 1 - place, self._device)


def backend_of(device: Device) -> CommunicatorBackend | None:
    """Return the backend that transfers KV in this device's memory; None if KV must go through host memory over
    gloo."""
    is_gpu = device.torch_device.type == "cuda" and dist.is_nccl_available()
    return NcclBackend(device.torch_device) if is_gpu else None
