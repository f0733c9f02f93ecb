"""An attention kernel behind a gate, by which a test stops a worker."""

import asyncio
import threading
from typing import Any

from torch import Tensor

from baton.modeling.forward.attention import Kernel


class Gate:
    """Attention kernel that waits while the gate is shut, so that its worker stops."""

    def __init__(self, kernel: Kernel) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.reached = threading.Event()
        self._kernel = kernel
        self._num_passes = 0

    def shut(self, num_passes: int = 0) -> None:
        """Shut the gate after `num_passes` more calls. There is one call per layer of a step."""
        self._num_passes = num_passes
        self.reached.clear()
        self.opened.clear()

    def open(self) -> None:
        self.opened.set()

    async def until_reached(self) -> None:
        """Wait until a worker waits at the shut gate."""
        assert await asyncio.to_thread(self.reached.wait, 20)

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor]:
        if not self.opened.is_set():
            if not self._num_passes:
                self.reached.set()
                assert self.opened.wait(120), "the test left the gate shut"
            else:
                self._num_passes -= 1
        return self._kernel(*args)
