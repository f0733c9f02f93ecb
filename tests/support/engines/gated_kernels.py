"""Workers that stand still when a test wants them to: an attention kernel with a gate before it."""

import asyncio
import threading
from typing import Any

from torch import Tensor

from baton.modeling.forward.attention import Kernel


class Gate:
    """An attention kernel that waits while the gate is shut: a worker that stands still when the test wants it to."""

    def __init__(self, kernel: Kernel) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.reached = threading.Event()
        self._kernel = kernel
        self._num_passes = 0

    def shut(self, num_passes: int = 0) -> None:
        """`num_passes` more calls (layers of steps) come through it."""
        self._num_passes = num_passes
        self.reached.clear()
        self.opened.clear()

    def open(self) -> None:
        self.opened.set()

    async def until_reached(self) -> None:
        """Somebody stands before the shut gate."""
        assert await asyncio.to_thread(self.reached.wait, 20)

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor]:
        if not self.opened.is_set():
            if not self._num_passes:
                self.reached.set()
                assert self.opened.wait(120), "the test left the gate shut"
            else:
                self._num_passes -= 1
        return self._kernel(*args)
