"""Open streams of an engine, and messages of other threads to the engine. The engine's thread shares only this state
with other threads.

Streams are opened and cancelled through `engine.core`, which processes the messages between two steps. The condition of
`slots.changes` protects all state. The engine's thread waits on this condition while it has nothing to run.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future

from baton.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from baton.text.stop_strings import StopStrings
from baton.text.token_masks import ChoiceMasks
from baton.types import LeaseRef
from generate_workers.engine.rows import EngineStream, EventSink, GenerationRequest, RowEndHook, StreamId
from generate_workers.slots.leases import BatchSlot
from generate_workers.slots.table import SlotTable


class RequestQueue:
    """Thread-safe queue of open streams, and of messages that open or end streams. Only the engine calls `take`,
    `claim_slots`, `forget` and `await_work`."""

    def __init__(self, max_waiting: int, slots: SlotTable) -> None:
        """Make a queue. `max_waiting` is the maximum number of waiting choices, not counting choices for which a slot
        is free."""
        self._max_waiting = max_waiting
        self._slots = slots
        self._condition = slots.changes.condition
        self.close_reason = ""
        """Reason why no more streams are accepted. Empty while the queue is open."""
        self._next_stream_id = 1
        self._open: dict[StreamId, EngineStream] = {}
        self._refs: dict[LeaseRef, StreamId] = {}
        self._waiting: dict[StreamId, int] = {}
        """Number of choices of each waiting stream. A stream waits if it has neither a lease nor slots."""
        self._preparing: dict[StreamId, EngineStream] = {}
        """Open streams whose token masks are not ready yet. The engine receives such a stream when its masks are
        ready."""
        self._inbox: list[EngineStream] = []
        self._cancelled: list[StreamId] = []

    def open(
        self,
        request: GenerationRequest,
        on_event: EventSink,
        hook: RowEndHook | None,
        prepare: Callable[[], Future[list[ChoiceMasks]]] | None = None,
    ) -> EngineStream:
        """Add a stream for a request and return it. `prepare` starts to compute the token masks of the choices, for
        constrained output. The engine gets the stream when the masks are ready. If `prepare` is None, the output is not
        constrained. Raises UnavailableError after `close`, InvalidArgumentError if the lease already has a stream, and
        ResourceExhaustedError if too many choices wait for a slot."""
        stop = StopStrings.of(request.params)  # not under the lock, which the engine's thread acquires in every step
        with self._condition:
            self.check_open()
            stream_id = StreamId(self._next_stream_id)
            if (ref := request.lease_ref) is None:
                self._take_place(stream_id, request.params.n)
            elif self._refs.setdefault(ref, stream_id) != stream_id:
                raise InvalidArgumentError(f"lease of slot {ref.slot} has a stream already: reserve another")
            self._next_stream_id += 1
            masks = None if prepare is None else prepare()
            stream = self._open[stream_id] = EngineStream(stream_id, request, on_event, stop, hook, masks)
            self._preparing[stream_id] = stream
            if masks is None:
                self._enter(stream)
        if masks is not None:
            masks.add_done_callback(lambda _: self._enter(stream))
        return stream

    def cancel(self, stream_id: StreamId) -> None:
        """Request that the engine end a stream. Idempotent. Has no effect on a stream that has ended."""
        with self._condition:
            if stream_id in self._open:
                self._cancelled.append(stream_id)
                self._condition.notify()

    def close(self, reason: str) -> None:
        """Refuse further streams with `reason` as the error. If the queue is already closed, the first reason is
        kept."""
        with self._condition:
            self.close_reason = self.close_reason or reason
            self._condition.notify()

    def check_open(self) -> None:
        """If the queue is closed, raise UnavailableError with the reason that was given to `close`."""
        with self._condition:
            if self.close_reason:
                raise UnavailableError(self.close_reason)

    @property
    def has_messages(self) -> bool:
        """True if the engine has messages to process, or a slot has changed."""
        with self._condition:
            return bool(self._slots.changes.has_changed or self._inbox or self._cancelled)

    def streams(self) -> list[EngineStream]:
        with self._condition:
            return list(self._open.values())

    def _enter(self, stream: EngineStream) -> None:
        """Pass a prepared stream to the engine, unless the engine has already got it in order to end it."""
        with self._condition:
            if self._preparing.pop(stream.stream_id, None) is not None:
                self._inbox.append(stream)
                self._condition.notify()

    # Called only by the engine's thread.

    def take(self) -> tuple[list[EngineStream], list[EngineStream]]:
        """Return a pair (new streams, streams to cancel) with the changes since the last call.

        A new stream is held back until its token masks are ready. If it is cancelled or the queue is closed, it is
        returned at once. If the lease of a stream was aborted and the stream already has sequences, running or
        preempted, the stream is among the streams to cancel. If it has no sequences yet, it is not: the engine detects
        that the lease has ended when it tries to add the stream to the batch.
        """
        with self._condition:
            cancelled, self._cancelled = self._cancelled, []
            abandoned = [self._refs[ref] for ref in self._slots.changes.take_abandoned() if ref in self._refs]
            ended = [stream_id for stream_id in self._preparing if self.close_reason or stream_id in cancelled]
            came = self._inbox + [self._preparing.pop(stream_id) for stream_id in ended]
            self._inbox = []
            cancelled += [stream_id for stream_id in abandoned if self._open[stream_id].has_rows]
            return came, [self._open[stream_id] for stream_id in dict.fromkeys(cancelled) if stream_id in self._open]

    def claim_slots(self, stream: EngineStream, occupy: Callable[[], list[BatchSlot] | None]) -> list[BatchSlot] | None:
        """Call `occupy` to get slots for a waiting stream, and return the slots. Return None if `occupy` returns None.
        A stream that has got slots no longer counts as waiting. The lock is held during the call. Other threads
        therefore count the stream exactly once: either as waiting, or as a user of slots."""
        with self._condition:
            batch_slots = occupy()
            if batch_slots is not None:
                del self._waiting[stream.stream_id]
            return batch_slots

    def forget(self, stream: EngineStream) -> None:
        """Remove a stream that has ended. Its structured output is not compiled if it still waits for this."""
        with self._condition:
            self._waiting.pop(stream.stream_id, None)
            del self._open[stream.stream_id]
            if stream.request.lease_ref is not None:
                self._refs.pop(stream.request.lease_ref, None)
        if stream.masks is not None:
            stream.masks.cancel()

    def await_work(self) -> bool:
        """Block until a message arrives, a slot changes, a lease expires, or the queue is closed. Return False if the
        queue is closed."""
        with self._condition:
            while not (self.close_reason or self.has_messages):
                left_s = self._slots.next_deadline_s() - self._slots.clock.now_s()
                if left_s <= 0:
                    break
                self._condition.wait(None if left_s == math.inf else min(left_s, threading.TIMEOUT_MAX))
            self._slots.changes.has_changed = False
            return not self.close_reason

    def _take_place(self, stream_id: StreamId, num_choices: int) -> None:
        # streams for which a slot is free get it before the next step
        num_queued = sum(self._waiting.values()) - self._slots.ledger().num_free
        if num_queued + num_choices > self._max_waiting:
            raise ResourceExhaustedError(f"{max(num_queued, 0)} requests wait for a slot already: try again later")
        self._waiting[stream_id] = num_choices
