"""Resources that many tests share and some tests break. A resource is started for the first test, and restarted after a
test that broke it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any


class Topology:
    """One shared cluster. `make` is a context manager that runs the cluster. `check` fails if the cluster has changed
    since its start."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]], check: Callable[[Any], None]) -> None:
        self._make = make
        self._check = check
        self._stack = ExitStack()
        self.running: Any = None
        """Value that `make` yielded; None before the first start."""
        self.is_broken = False
        """True if the cluster must be restarted for the next test. A test that cannot restore the cluster sets it."""

    def prepare(self) -> None:
        """Start the cluster, unless it runs and is not broken."""
        if self.is_broken:
            self.close()
        if self.running is None:
            self.running = self._stack.enter_context(self._make())
            self.check()

    def check(self) -> None:
        """Check that the cluster is unchanged since its start. If it has changed, mark it as broken and fail."""
        self.is_broken = True
        self._check(self.running)
        self.is_broken = False

    def close(self) -> None:
        """Stop the cluster. Idempotent."""
        self.running, self.is_broken = None, False
        self._stack.close()
