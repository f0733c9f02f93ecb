"""Who may run, and who waits: first in, first out, bounded by requests and by prompt tokens.

Step 2 of a request's way (DESIGN.md, section 4). Never waits itself: whoever joins gets an Entry to wait on, and must
leave in the end. On the loop.
"""

import asyncio

from baton.clock import Clock
from baton.errors import ResourceExhaustedError
from orchestrator.config import OrchestratorConfig

_SMOOTHING = 0.2
"""Weight of the newest request in the mean time that requests run."""
_LONGEST_RETRY_S = 60.0


class Entry:
    """One request's place, in the queue or among those that run."""

    def __init__(self, num_tokens: int, num_slots: int) -> None:
        self.num_tokens = num_tokens
        self.num_slots = num_slots
        self.started_s: float | None = None
        """When it left the queue; None while it waits."""
        self._turn = asyncio.Event()

    async def admitted(self) -> None:
        """Returns when it is this request's turn. A cancelled wait changes nothing: `leave` does."""
        await self._turn.wait()

    def start(self, now_s: float) -> None:
        self.started_s = now_s
        self._turn.set()


class Admission:
    """The queue and the number of those that run. Used on the loop."""

    def __init__(self, config: OrchestratorConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._limit = config.max_running
        self._waiting: dict[Entry, None] = {}
        self._running: set[Entry] = set()
        self._num_tokens = 0
        """Prompt tokens of all that wait."""
        self._mean_s = 1.0
        """Smoothed seconds that a request runs."""

    @property
    def num_queued(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def resize(self, num_slots: int) -> None:
        """The cluster has so many slots now; while it has none, whoever may run finds out for itself."""
        self._limit = min(num_slots or self._config.max_running, self._config.max_running)
        self._admit()

    def join(self, num_tokens: int, num_slots: int = 1) -> Entry:
        """A place for a request with so many prompt tokens and choices. Raises ResourceExhaustedError, which says when
        to try again, when it would have to wait and the queue is full."""
        entry = Entry(num_tokens, num_slots)
        if self._waiting or not self._has_room(entry):
            self._check_room(num_tokens)
        self._waiting[entry] = None
        self._num_tokens += num_tokens
        self._admit()
        return entry

    def leave(self, entry: Entry) -> None:
        """Gives the place up, wherever it is; idempotent."""
        if entry in self._waiting:
            self._drop(entry)
        elif entry in self._running:
            self._running.remove(entry)
            assert entry.started_s is not None
            self._mean_s += _SMOOTHING * (self._clock.now_s() - entry.started_s - self._mean_s)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_room(entry := next(iter(self._waiting))):
            self._drop(entry)
            self._running.add(entry)
            entry.start(self._clock.now_s())

    def _has_room(self, entry: Entry) -> bool:
        """Whether it may run; alone it may always, and finds out for itself."""
        num_taken = sum(each.num_slots for each in self._running)
        return not num_taken or num_taken + entry.num_slots <= self._limit

    def _drop(self, entry: Entry) -> None:
        del self._waiting[entry]
        self._num_tokens -= entry.num_tokens

    def _check_room(self, num_tokens: int) -> None:
        config = self._config
        if len(self._waiting) >= config.max_queued:
            raise self._full(f"{len(self._waiting)} requests wait already: the queue holds {config.max_queued}")
        if self._num_tokens + num_tokens > config.max_queued_tokens:
            raise self._full(
                f"{self._num_tokens} prompt tokens wait already: with {num_tokens} more they would exceed the queue's "
                f"{config.max_queued_tokens}"
            )

    def _full(self, why: str) -> ResourceExhaustedError:
        retry_s = min(self._mean_s * (len(self._waiting) + 1) / self._limit, _LONGEST_RETRY_S)
        return ResourceExhaustedError(f"{why}: try again in {retry_s:.1f} s", retry_after_s=retry_s)
