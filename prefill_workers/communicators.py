"""Communicators that transfer KV between two ranks, and the choice between host memory and device memory for the KV.

Headers always travel by gloo (`prefill_workers.torch_links`). A payload follows its header on the communicator of the
two ranks. There are two kinds of communicators:

    host memory     the gloo pair that also carries the headers; ranks on devices copy KV to pinned memory (`device_kv`)
    device memory   a communicator of these two ranks only, made by a CommunicatorBackend (NCCL)

A rank passes on the KV that it receives, so all of its communicators must use the same kind of memory. Hence all
communicators of a group are of one kind. The ranks choose the kind at the start of each epoch: each rank writes its
offer (its backend and device) to the store, reads the offers of all other ranks, and applies the same rule. On
communicators between devices, a header announces exactly one payload, so that both sides call the communicator in the
same order.

The NCCL communicators were written from the documentation and sources of torch and NCCL. They have not been run yet,
because this needs a machine with two GPUs (tests/cuda/test_chain.py). For this reason their code is small, and the code
around it is tested with gloo communicators. They rely on these facts:

- Each communicator is a separate ProcessGroupNCCL of two ranks. NCCL ignores tags and runs the operations of a
  communicator in the order of the calls. The headers, which are sent first, determine this order.
- torch's watchdog ends the process when a peer fails. TORCH_NCCL_BLOCKING_WAIT keeps torch from starting the watchdog.
  This variable would also turn Work.wait into a poll, so the code waits for a stream instead.
- An operation that the peer does not join never ends by itself, even when the peer is dead. `abort` ends it.
  `torch_links` calls `abort` when the epoch ends: when a link breaks, when a peer is silent for longer than the
  watchdog's limit, or when the links are closed.
- NCCL does not support two ranks on one GPU. If a group has such ranks, `refusal` makes it use host memory.
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
    """Parameters with which a rank joins an epoch, i.e. connects to the other ranks of its group."""

    epoch: Epoch
    rank: Rank
    num_ranks: int
    store: str
    """Address (host:port) of the TCPStore through which the ranks connect to each other."""
    host: str
    """Address of the network interface that this rank uses for its links."""
    timeout_s: float
    """Timeout in seconds for connecting to the other ranks."""


class Group(Protocol):
    """Point-to-point methods of torch's process groups that this module uses. No collective operation is used."""

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work: ...

    def abort(self) -> None: ...


class Communicator(Protocol):
    """Transfers payloads between this rank and one other rank. Payloads of each direction arrive in order. An
    implementation does not have to support two operations at the same time, because chains send only from lower to
    higher ranks."""

    def empty(self, num_bytes: int) -> Tensor:
        """Return a new uint8 tensor of `num_bytes` bytes, in memory into which the communicator can receive."""
        ...

    def send(self, payload: Tensor) -> None:
        """Send a uint8 tensor, and block until its memory may be reused. Raises RuntimeError if the communicator is
        broken."""
        ...

    def receive(self, place: Tensor) -> None:
        """Receive a payload into `place`, and block until all bytes have arrived. `place` is a uint8 tensor of the
        payload's size. Raises RuntimeError if the communicator is broken. If `abort` is called, this call may return,
        but the bytes in `place` are undefined."""
        ...

    def abort(self) -> None:
        """Make blocked calls return or raise within a bounded time, even if the peer does not respond. If the backend
        cannot do this, the calls end when the peer's process ends. May be called on any thread. The communicator cannot
        be used afterwards."""
        ...


class CommunicatorBackend(Protocol):
    """Factory of communicators that transfer payloads between the devices of two ranks."""

    @property
    def kind(self) -> str:
        """Return the name and version of the backend. Two ranks can be connected only if this value is the same on
        both."""

    @property
    def device_id(self) -> str:
        """Return an id of this rank's device that is unique among all devices of all hosts."""

    def connect(self, store: dist.Store, place: int, timeout_s: float) -> Communicator:
        """Return a communicator between two ranks. Both ranks must call this with the same store, which is used by no
        other pair of ranks. The lower rank passes `place` 0, the higher rank 1. Blocks until both ranks have called.
        Raises RuntimeError after `timeout_s` seconds."""
        ...


class GroupCommunicator:
    """Communicator over a gloo process group. A blocked call ends when its operation is complete, or when the peer's
    process ends."""

    def __init__(self, group: Group, peer: int) -> None:
        self._group, self._peer = group, peer

    def empty(self, num_bytes: int) -> Tensor:
        """Return a new uint8 tensor of `num_bytes` bytes in host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, payload: Tensor) -> None:
        """Send a payload, and block until the peer has received all of it."""
        self._group.send([payload], self._peer, _TAG).wait(FOREVER)

    def receive(self, place: Tensor) -> None:
        """Receive a payload into `place`, and block until all bytes have arrived."""
        self._group.recv([place], self._peer, _TAG).wait(FOREVER)

    def abort(self) -> None:
        """Do nothing. With gloo, blocked calls do not need to be aborted: a peer that has closed its links still
        receives payloads and drops them, and calls fail when the peer's process ends."""


def gloo_group(store: dist.Store, rank: int, num_ranks: int, host: str, timeout_s: float) -> Group:
    """Return a new gloo process group that is independent of torch's default group. It uses the network interface with
    the address `host`. Blocks until all ranks have joined. Raises RuntimeError on a timeout."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return cast(Group, dist.ProcessGroupGloo(store, rank, num_ranks, options))


@dataclass(frozen=True)
class Offer:
    """Description of the device communication that one rank supports: the kind of its backend, and the id of its
    device. Both are empty if the rank has no backend. The ranks exchange offers to select a common kind."""

    kind: str = ""
    device_id: str = ""

    @classmethod
    def of(cls, backend: CommunicatorBackend | None) -> "Offer":
        """Return the offer of a rank with this backend. `backend` is None if the rank can use host memory only."""
        return cls(backend.kind, backend.device_id) if backend is not None else cls()


def refusal(offers: Sequence[Offer]) -> str:
    """Return the reason why the ranks must send payloads through host memory. Return an empty string if they can send
    payloads directly between their devices. `offers` has one offer per rank, in rank order."""
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
    """Return the communicators between this rank's device and the devices of all other ranks, by rank. Return an empty
    dict if payloads must be sent through host memory.

    All ranks of the epoch must call this function with the same store. Blocks until all ranks have called it. Raises
    RuntimeError on a timeout.
    """
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
    """NCCL communicator between two GPUs. The docstring of the module lists the properties of NCCL and torch on which
    this class relies."""

    def __init__(self, group: Group, peer: int, device: torch.device) -> None:
        super().__init__(group, peer)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def empty(self, num_bytes: int) -> Tensor:
        """Return a new uint8 tensor of `num_bytes` bytes in GPU memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, payload: Tensor) -> None:
        """Send a payload, and block until it is sent. Uses the communicator's own CUDA stream, and releases the GIL
        while it waits. The computation of the payload must have ended."""
        self._run(lambda: self._group.send([payload], self._peer, 0))

    def receive(self, place: Tensor) -> None:
        """Receive a payload into `place`, and block until all bytes have arrived. Uses the communicator's own CUDA
        stream, and releases the GIL while it waits. Earlier reads of `place` must have ended."""
        self._run(lambda: self._group.recv([place], self._peer, 0))

    def abort(self) -> None:
        """Abort the communicator, which ends GPU kernels that wait for the peer. Blocks for at most the timeout that
        was given to `connect`."""
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
        """Return a communicator between two ranks. NCCL initializes it at the first message. The lower rank passes
        `place` 0, the higher rank 1. `timeout_s` limits the duration of the communicator's `abort`, and nothing
        else."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        group = dist.ProcessGroupNCCL(store, place, 2, options)
        return NcclCommunicator(cast(Group, group), 1 - place, self._device)


def backend_of(device: Device) -> CommunicatorBackend | None:
    """Return the backend that transfers KV between this device's memory and other devices. Return None if KV must be
    sent through host memory over gloo."""
    is_gpu = device.torch_device.type == "cuda" and dist.is_nccl_available()
    return NcclBackend(device.torch_device) if is_gpu else None
