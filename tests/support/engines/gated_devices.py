"""Devices for tests whose link copies when it is told to."""

import asyncio
import threading

from torch import Tensor

from baton.modeling.device.copying import LinkAccess, copy_bytes
from tests.support.engines.devices import STANDING_FOR_A_GPU, PoisonedDevice, TensorDevice

_TIMEOUT_S = 20


class Gate:
    """A link's way of copying: each copy begins, and then waits until the gate is open."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        """What copies fail with from now on."""
        self._begun = threading.Semaphore(0)
        self._open = threading.Event()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copies a tensor once the gate is open."""
        self._begun.release()
        assert self._open.wait(_TIMEOUT_S), "the gate was not opened"
        if self.error is not None:
            raise self.error
        copy_bytes(to, source)

    async def begun(self) -> None:
        """Returns once one more copy has begun."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=_TIMEOUT_S), "no copy has begun"

    def open(self) -> None:
        """Lets all copies go on."""
        self._open.set()


def gated_device(name: str, gate: Gate, num_frames: int, frame_bytes: int) -> PoisonedDevice | TensorDevice:
    """A device that stands for a GPU, with a link behind a gate and few small frames."""
    device = STANDING_FOR_A_GPU[name]()
    assert isinstance(device, PoisonedDevice | TensorDevice)
    device.link._copy = gate.copy
    device._access = LinkAccess.plain(device.link, num_frames, frame_bytes)
    return device
