"""Transfers: copies that were asked for and may still be on their way, as over a link of `modeling.device`."""

from typing import Protocol


class Transfer(Protocol):
    """Copies that were asked for together. Neither memory may change before they are done."""

    def result(self) -> None:
        """Wait until all is copied; raise what went wrong."""

    def join(self) -> None:
        """Let what this thread computes from now on begin behind the copies; raise what went wrong by now. On CUDA the
        device waits, not the thread."""

    def wait(self) -> None:
        """Wait until the copying has ended, even if it failed."""


class Finished:
    """A Transfer that is done."""

    def result(self) -> None:
        """Return at once: there is nothing to wait for."""

    join = wait = result
