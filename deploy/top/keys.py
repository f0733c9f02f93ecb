"""Reads keys of the terminal when they are pressed. Blocks; used on the main thread."""

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
    """Read keys without echo and without the return key, until the `with` block ends. Yields a function that waits for
    a key for at most the given number of seconds, and returns it, or "" if no key was pressed.

    Raises ConfigError when standard input is not a terminal.
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
