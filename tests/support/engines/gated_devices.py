"""Devices for tests whose link copies only while the test permits it, or whose compute stream the test occupies."""

import asyncio
import threading
from concurrent.futures import Future

from torch import Tensor

from baton.modeling.device.copying import UNBOUND, CopyTensor, LinkAccess, LinkRate, PacedLink, copy_bytes
from baton.modeling.device.port import Copies, Running
from baton.modeling.kv.transfers import Transfer
from tests.support.engines.devices import STANDING_FOR_A_GPU, PoisonedDevice, TensorDevice

_TIMEOUT_S = 20


class Gate:
    """Copy function of a link. Each copy starts, and then waits until the gate is open."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        """Error that all further copies raise; None: copies succeed."""
        self._begun = threading.Semaphore(0)
        self._open = threading.Event()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy a tensor after the gate has opened."""
        self._begun.release()
        assert self._open.wait(_TIMEOUT_S), "the gate was not opened"
        if self.error is not None:
            raise self.error
        copy_bytes(to, source)

    async def begun(self) -> None:
        """Wait until one more copy has started."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=_TIMEOUT_S), "no copy has begun"

    def open(self) -> None:
        """Open the gate, so that all copies continue."""
        self._open.set()


def gated_device(name: str, gate: Gate, num_frames: int, frame_bytes: int) -> PoisonedDevice | TensorDevice:
    """Return a CPU device that replaces a GPU. Its link copies through `gate`, and has a small number of small
    frames."""
    device = STANDING_FOR_A_GPU[name]()
    assert isinstance(device, PoisonedDevice | TensorDevice)
    device.link._copy = gate.copy
    device._access = LinkAccess.plain(device.link, num_frames, frame_bytes)
    return device


class SteppedLink(PacedLink):
    """Link of a device on whose compute stream the test queues steps, as an engine does on a GPU: copies run while a
    step computes, unless they were requested to begin after the queued work."""

    def __init__(self, rate: LinkRate = UNBOUND, copy: CopyTensor = copy_bytes) -> None:
        super().__init__(rate, copy)
        self.fetches: list[tuple[int, Transfer | None]] = []
        """Number of copies and argument `after` of each call of `fetch`."""
        self.waits = list[bool]()
        """For each call of `fetch`, whether its copies wait for the running step."""
        self.copied = list[bool]()
        """For each call of `fetch`, whether a step was running when its copies began."""
        self.entered = threading.Semaphore(0)
        """Released once by each call of `fetch`, before it returns."""
        self.may_return = threading.Event()
        """Event without which no call of `fetch` returns. It is set at first."""
        self.may_return.set()
        self._step: Future[None] = Future()
        self._step.set_result(None)

    @property
    def is_computing(self) -> bool:
        """Return True if a step has begun and has not ended."""
        return not self._step.done()

    def begin_step(self) -> None:
        """Queue a step on the compute stream. It runs until `end_step`."""
        assert not self.is_computing
        self._step = Future()

    def end_step(self) -> None:
        self._step.set_result(None)

    def queued(self) -> Transfer:
        return Running(self._step)

    def _copy_all(self, copies: Copies) -> None:
        self.copied.append(self.is_computing)
        super()._copy_all(copies)

    def fetch(self, copies: Copies, *, after: Transfer | None) -> Transfer:
        self.fetches.append((len(copies), after))
        self.waits.append(isinstance(after, Running) and not after._future.done())
        self.entered.release()
        assert self.may_return.wait(_TIMEOUT_S), "the test did not let the call return"
        return super().fetch(copies, after=after)


def stepped_device(link: SteppedLink, num_frames: int, frame_bytes: int) -> PoisonedDevice:
    """Return an emulated device with this link and a small number of small frames."""
    device = PoisonedDevice()
    device.link, device._access = link, LinkAccess.plain(link, num_frames, frame_bytes)
    return device
