"""Shares answers among consoles: all open consoles of a caller cause only one call to the server at a time. Runs on the
asyncio loop.

The feed never calls the server by itself. Each visible console requests the latest answer repeatedly. An answer, or an
error, is reused for FRESH_S. Answers are stored separately for each caller, because the server may answer callers
differently. A caller is identified by headers of its request.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.errors import BatonError
from baton.process.clock import Clock

T = TypeVar("T")

FRESH_S = 1.0
"""Time in seconds for which an answer, or an error, is reused."""
MAX_CALLERS = 64
"""Maximum number of callers whose latest answers are stored. If there are more, the least recently used answer is
deleted."""


@dataclass
class _Latest(Generic[T]):
    """Latest answer, or error, for one caller."""

    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that is held during a call to the server. Other consoles of the same caller wait for it and use the same
    answer."""
    told_s: float = float("-inf")
    answer: T | None = None
    error: BatonError | None = None


class Feed(Generic[T]):
    """Cache of the latest answer of one server to each caller."""

    def __init__(self, ask: Callable[[Mapping[str, str]], Awaitable[T]], clock: Clock) -> None:
        """Make a cache. `ask` calls the server on behalf of a caller. Its argument has the headers that identify the
        caller."""
        self._ask = ask
        self._clock = clock
        self._latest: OrderedDict[str, _Latest[T]] = OrderedDict()

    async def latest(self, caller: Mapping[str, str]) -> T:
        """Return an answer for the caller that is at most FRESH_S seconds old. The server is called only if no such
        answer is stored. Raises a BatonError if the server returned an error. If a call to the server is cancelled, the
        next waiting request repeats the call."""
        latest = self._of(caller)
        async with latest.asking:
            if self._clock.now_s() - latest.told_s >= FRESH_S:
                try:
                    latest.answer, latest.error = await self._ask(caller), None
                except BatonError as error:
                    latest.answer, latest.error = None, error
                latest.told_s = self._clock.now_s()
            if latest.error is not None:
                raise latest.error
            assert latest.answer is not None, "an answer or an error"
            return latest.answer

    def _of(self, caller: Mapping[str, str]) -> _Latest[T]:
        named = hashlib.sha256(json.dumps(sorted(caller.items())).encode()).hexdigest()  # keys are not stored
        latest = self._latest.setdefault(named, _Latest())
        self._latest.move_to_end(named)
        while len(self._latest) > MAX_CALLERS:
            self._latest.popitem(last=False)
        return latest
