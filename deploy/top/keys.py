"""Keys of the terminal, as they are pressed. Blocks; on the main thread."""

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from baton.errors import ConfigError


@contextlib.contextmanager
def pressed_keys() -> Iterator[Callable[[float], str]]:
    """Take keys without echo and without the return key, until the block ends. Yields a function that waits at most so
    many seconds for a key and returns it; empty when none was pressed.

    Raises ConfigError when standard input is no terminal.
    """
    descriptor = sys.stdin.fileno() if sys.stdin.isatty() else None
    if descriptor is None:
        raise ConfigError("standard input is not a terminal, so keys cannot be read: use --once")
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
