"""Which streams are open, and what other threads ask of the engine: its one meeting point with them.

Step 8 of a request's way (DESIGN.md, section 4). Everything here is guarded by one condition, on which the engine also
sleeps while there is nothing to run.
"""

import math
import threading
from collections.abc import Callable

from baton.clock import Clock
from baton.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from baton.types import LeaseRef
from generate_workers.engine.rows import EventSink, FilledSink, GenerationRequest, Row, Stream, Ticket
from generate_workers.slots.leases import Seat
from modeling.prefix_store.store import Filled
from text.stop_strings import StopStrings


class StreamBook:
    """The open streams, and those that came or are to go. Thread-safe; only the engine takes, seats and forgets."""

    def __init__(self, max_waiting: int, num_free: Callable[[], int]) -> None:
        """`max_waiting`: choices that may wait for a slot, those that one of the `num_free` awaits not counted."""
        self._max_waiting = max_waiting
        self._num_free = num_free
        self._condition = threading.Condition()
        self._closed = ""
        """Why nothing more is taken; empty while open."""
        self._woken = False
        self._next_ticket = 1
        self._open: dict[Ticket, Stream] = {}
        self._refs: dict[LeaseRef, Ticket] = {}
        self._waiting: dict[Ticket, int] = {}
        """Choices of each open stream without a lease that has no slots yet."""
        self._inbox: list[Stream] = []
        self._cancelled: list[Ticket] = []
        self._abandoned: list[Ticket] = []
        self._saved: list[tuple[Row, Filled]] = []

    def open(self, request: GenerationRequest, on_event: EventSink, on_filled: FilledSink) -> Stream:
        """Enters a stream. Raises UnavailableError once closed, InvalidArgumentError for a lease that has a stream,
        ResourceExhaustedError when too many wait for a slot."""
        stop = StopStrings(request.params.stop)  # before the lock, which the engine's thread takes in every step
        with self._condition:
            self.check_open()
            ticket = Ticket(self._next_ticket)
            if request.lease_ref is not None:
                self._take_ref(request.lease_ref, ticket)
            else:
                self._take_place(ticket, request.params.n)
            self._next_ticket += 1
            stream = self._open[ticket] = Stream(ticket, request, on_event, stop, on_filled)
            self._inbox.append(stream)
            self._condition.notify()
        return stream

    def cancel(self, ticket: Ticket) -> None:
        """Asks for a stream's end; idempotent."""
        with self._condition:
            if ticket in self._open:
                self._cancelled.append(ticket)
                self._condition.notify()

    def abandon(self, ref: LeaseRef) -> None:
        """Asks for the end of the lease's stream, if that has rows, running or preempted; else the lease's end is
        found when it would join. Idempotent."""
        with self._condition:
            if ref in self._refs:
                self._abandoned.append(self._refs[ref])
                self._woken = True
                self._condition.notify()

    def saved(self, row: Row, filled: Filled) -> None:
        """Nobody reads the row's KV any more."""
        with self._condition:
            self._saved.append((row, filled))
            self._woken = True
            self._condition.notify()

    def wake(self) -> None:
        """Something changed that the engine may wait for."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def close(self, reason: str) -> None:
        """Takes no more streams; the first reason counts."""
        with self._condition:
            self._closed = self._closed or reason
            self._condition.notify()

    def check_open(self) -> None:
        """Raises UnavailableError, with the reason, once closed."""
        with self._condition:
            if self._closed:
                raise UnavailableError(self._closed)

    @property
    def close_reason(self) -> str:
        """Empty while open."""
        return self._closed

    def streams(self) -> list[Stream]:
        """All open ones."""
        with self._condition:
            return list(self._open.values())

    def num_saving(self, ticket: Ticket) -> int:
        """Rows of a stream that are being stored."""
        with self._condition:
            stream = self._open.get(ticket)
            return len(stream.saving) if stream is not None else 0

    # The engine's thread.

    def take(self) -> tuple[list[Stream], list[Stream]]:
        """`(came, to be cancelled)` since the last call."""
        with self._condition:
            came, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
            abandoned, self._abandoned = self._abandoned, []
            cancelled += [ticket for ticket in abandoned if ticket in self._open and self._open[ticket].has_rows]
            return came, [self._open[ticket] for ticket in dict.fromkeys(cancelled) if ticket in self._open]

    def take_saved(self) -> list[tuple[Row, Filled]]:
        """Rows whose KV has been stored, or not, since the last call."""
        with self._condition:
            saved, self._saved = self._saved, []
            return saved

    def seat(self, stream: Stream, occupy: Callable[[], list[Seat] | None]) -> list[Seat] | None:
        """Ends a stream's wait with the slots that `occupy` finds: whoever asks for a place meanwhile counts it neither
        twice nor not at all."""
        with self._condition:
            seats = occupy()
            if seats is not None:
                del self._waiting[stream.ticket]
            return seats

    def forget(self, stream: Stream) -> None:
        """The stream has ended."""
        with self._condition:
            self._waiting.pop(stream.ticket, None)
            del self._open[stream.ticket]
            if stream.request.lease_ref is not None:
                self._refs.pop(stream.request.lease_ref, None)

    def await_work(self, next_deadline_s: Callable[[], float], clock: Clock) -> bool:
        """Sleeps until something was asked or the deadline has passed; False when closed."""
        with self._condition:
            while not (self._closed or self._woken or self._inbox or self._cancelled):
                left_s = next_deadline_s() - clock.now_s()
                if left_s <= 0:
                    break
                self._condition.wait(None if left_s == math.inf else min(left_s, threading.TIMEOUT_MAX))
            self._woken = False
            return not self._closed

    def _take_ref(self, ref: LeaseRef, ticket: Ticket) -> None:
        if ref in self._refs:
            raise InvalidArgumentError(f"lease of slot {ref.slot} has a stream already: reserve another")
        self._refs[ref] = ticket

    def _take_place(self, ticket: Ticket, num_choices: int) -> None:
        num_queued = sum(self._waiting.values()) - self._num_free()  # the others get theirs with the next step
        if num_queued + num_choices > self._max_waiting:
            raise ResourceExhaustedError(f"{max(num_queued, 0)} requests wait for a slot already: try again later")
        self._waiting[ticket] = num_choices
