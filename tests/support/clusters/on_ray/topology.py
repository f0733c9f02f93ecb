"""What many tests share and some break: started for the first, and started anew after one that broke it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any


class Topology:
    """One shared cluster; `make` brings it up and ends it, `check` fails unless it is as it was made."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]], check: Callable[[Any], None]) -> None:
        self._make = make
        self._check = check
        self._stack = ExitStack()
        self.running: Any = None
        """What `make` made; None before the first start."""
        self.is_broken = False
        """Whether the next test needs it anew. A test that cannot restore it sets this."""

    def prepare(self) -> None:
        """Start it, unless it runs and is whole."""
        if self.is_broken:
            self.close()
        if self.running is None:
            self.running = self._stack.enter_context(self._make())
            self.check()

    def check(self) -> None:
        """Fail, and count as broken, unless it is as it was made."""
        self.is_broken = True
        self._check(self.running)
        self.is_broken = False

    def close(self) -> None:
        """End it. Idempotent."""
        self.running, self.is_broken = None, False
        self._stack.close()
