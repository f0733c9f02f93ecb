"""Transfers: requested copies that may not be done yet, such as those over a link (`baton.modeling.device`)."""

from typing import Protocol


class Transfer(Protocol):
    """Copies that were requested together. Neither memory may change before they are done."""

    def result(self) -> None:
        """Wait until all is copied. Raises the error of a failed copy."""

    def join(self) -> None:
        """Order all later work of this thread after the copies. Raises the error of a copy that has failed by now. On
        CUDA the device waits, not the thread."""

    def wait(self) -> None:
        """Wait until the copying has ended, even if it failed."""


class DoneTransfer:
    """A Transfer that is already done."""

    def result(self) -> None:
        """Return at once: there is nothing to wait for."""

    join = wait = result
