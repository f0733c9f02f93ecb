"""Watches one cluster: takes samples, and makes a frame from the latest sample, with rates over the last 30 seconds.
Blocks."""

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
"""Seconds over which rates and latencies are computed."""


class Watch:
    """Samples of the cluster at `target`, and the frame that they make."""

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
        """Take a sample and return its frame. Raises a BatonError if the orchestrator does not answer."""
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
        """Return a new frame. If that fails, return the last frame below a line with the reason."""
        try:
            return self.look()
        except (UnavailableError, DeadlineExceededError) as error:
            return Group(Text(f"no answer: {error}", style="bold red"), self._last)


def print_once(watch: Watch, interval_s: float, console: Console) -> None:
    """Print one frame, with the rates of one interval. Raises a BatonError if the orchestrator does not answer."""
    watch.look()
    Event().wait(interval_s)  # the time over which rates are taken
    console.print(watch.look())


def draw_until_quit(watch: Watch, interval_s: float, console: Console) -> None:
    """Draw a frame every interval, and at each key, until q is pressed. If the orchestrator stops answering, wait for
    it. Raises UnavailableError if it does not answer at the beginning, and ConfigError without a terminal."""
    with pressed_keys() as wait:
        first = watch.look()
        with Live(first, console=console, screen=True, auto_refresh=False) as live:
            live.refresh()
            while wait(interval_s) != "q":
                live.update(watch.look_patiently(), refresh=True)


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
