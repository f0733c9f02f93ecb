"""Devices for tests whose link copies only while the test permits it."""

import asyncio
import threading

from torch import Tensor

from baton.modeling.device.copying import LinkAccess, copy_bytes
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
