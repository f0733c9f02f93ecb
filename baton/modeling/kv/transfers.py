"""Transfers: requested copies that may not be done yet, such as those over a link (`baton.modeling.device`)."""

from typing import Protocol


class Transfer(Protocol):
    """Copies that were requested together. Source and target memory must not change before they are done."""

    def result(self) -> None:
        """Wait until all bytes are copied. Raises the error of a failed copy."""

    def join(self) -> None:
        """Order all later work of this thread after the copies. Raises the error of a copy that has already failed. On
        CUDA the device waits, not the thread."""

    def wait(self) -> None:
        """Wait until the copies have ended, even if they failed."""


class DoneTransfer:
    """A Transfer that is already done."""

    def result(self) -> None:
        """Return immediately, because the copies are done."""

    join = wait = result
