"""Watches one cluster. Takes samples, and makes a frame from the latest sample with rates over the last 30 seconds.
Functions block."""

import contextlib
import os
import select
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from threading import Event

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from baton.client import Client
from baton.errors import ConfigError, DeadlineExceededError, UnavailableError
from baton.process.clock import Clock
from deploy.top.frame import frame
from deploy.top.rates import between
from deploy.top.sampling import Snapshot, take

WINDOW_S = 30.0
"""Period in seconds over which rates and latencies are computed."""


class Watch:
    """Samples of the cluster at `target`, from which frames are made."""

    def __init__(self, client: Client, target: str, clock: Clock) -> None:
        self._client = client
        self._target = target
        self._clock = clock
        self._window: deque[Snapshot] = deque()
        self._last: RenderableType = ""

    @property
    def is_serving(self) -> bool:
        """True if the cluster serves, according to the latest sample."""
        return not self._window[-1].state.why_not_serving

    def look(self) -> RenderableType:
        """Take a sample and return the frame that shows it. Raises a BatonError if the orchestrator does not answer."""
        now = take(self._client, self._clock)
        while self._window and now.at_s - self._window[0].at_s > WINDOW_S:
            self._window.popleft()
        rates = between(self._window[0], now) if self._window else None
        if rates is None:  # the orchestrator has reset its counts
            self._window.clear()
        self._window.append(now)
        time_of_day = datetime.fromtimestamp(self._clock.unix_ns() / 1e9).astimezone()
        self._last = frame(self._target, now, rates, f"{time_of_day:%H:%M:%S}")
        return self._last

    def look_patiently(self) -> RenderableType:
        """Take a sample and return its frame. If the orchestrator does not answer, return the previous frame with an
        error line above it."""
        try:
            return self.look()
        except (UnavailableError, DeadlineExceededError) as error:
            return Group(Text(f"no answer: {error}", style="bold red"), self._last)


def print_once(watch: Watch, interval_s: float, console: Console) -> None:
    """Print one frame, with rates over an interval of `interval_s` seconds. Blocks for this interval. Raises a
    BatonError if the orchestrator does not answer."""
    watch.look()
    Event().wait(interval_s)  # the time over which rates are taken
    console.print(watch.look())


def draw_until_quit(watch: Watch, interval_s: float, console: Console) -> None:
    """Draw a frame every `interval_s` seconds, and after each key, until the key q is pressed. If the orchestrator
    stops answering, the last frame stays on the screen with an error until it answers again. Raises UnavailableError if
    the orchestrator does not answer at the beginning, and ConfigError if standard input is not a terminal."""
    with pressed_keys() as wait:
        first = watch.look()
        with Live(first, console=console, screen=True, auto_refresh=False) as live:
            live.refresh()
            while wait(interval_s) != "q":
                live.update(watch.look_patiently(), refresh=True)


@contextlib.contextmanager
def pressed_keys() -> Iterator[Callable[[float], str]]:
    """Let the terminal deliver single keys, without echo and without the return key, until the `with` block ends.
    Yields a function that waits for a key for at most the given number of seconds. The function returns the key, or ""
    if no key was pressed.

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
