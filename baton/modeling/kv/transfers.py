"""Interface of transfers: copies that have been requested but may not be done yet, such as copies over a link
(`baton.modeling.device`)."""

from typing import Protocol


class Transfer(Protocol):
    """Copies that were requested together. The source and target memory must not change before the copies are done."""

    def result(self) -> None:
        """Wait until the copies are done. Raises the error of a failed copy."""

    def join(self) -> None:
        """Make all later work of this thread run after the copies. On CUDA, the device waits for the copies, and the
        thread does not wait. Raises the error of a copy that has already failed."""

    def wait(self) -> None:
        """Wait until the copies have ended. Does not raise an error if they failed."""


class DoneTransfer:
    """Transfer whose copies are already done."""

    def result(self) -> None:
        """Return immediately, because the copies are already done."""

    join = wait = result
