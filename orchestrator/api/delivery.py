"""Writes a stream's messages to its client, and ends the call of a client that does not read.

Used by `orchestrator.api.frontend` and `orchestrator.api.gateway`. gRPC holds a write back until the client has read
enough of what was sent before, for ever if the client never reads. A client that reads slowly is never ended by this,
as long as it lets each message go within `STALLED_S`. On the loop.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from baton.errors import BatonError, DeadlineExceededError, ResourceExhaustedError
from baton.limits import DELIVERY_GRACE_S, STALLED_S


class MessageWriter(Protocol):
    """The side of a call's context that sends messages; grpc.aio's ServicerContext has it."""

    async def write(self, message: Any) -> None:
        """Send a message, as soon as the client has room for it."""


async def deliver(context: MessageWriter, messages: AsyncIterator[Any], left_s: float | None) -> None:
    """Write each message to the client as it comes. `left_s`: seconds until the request's deadline; None without one.

    Raises ResourceExhaustedError once a write has taken `STALLED_S`, DeadlineExceededError when one still waits after
    the deadline and `DELIVERY_GRACE_S`, and what `messages` raises.
    """
    watch = _Watch(left_s)
    try:
        async for message in messages:
            watch.begin()
            await context.write(message)
            watch.end()
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error  # the client has left in the middle of a write
    except asyncio.CancelledError:
        watch.raise_error()
        raise
    finally:
        watch.close()


class _Watch:
    """Cancels the task that made it when one of its writes takes too long. Sets no timer for a message."""

    def __init__(self, left_s: float | None) -> None:
        task = asyncio.current_task()
        assert task is not None, "made in a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._end_s = None if left_s is None else self._loop.time() + left_s + DELIVERY_GRACE_S
        self._since_s: float | None = None
        """Time on the loop's clock at which the present write began; None between two writes."""
        self._error: BatonError | None = None
        """Why the task was cancelled; None if it was not."""
        self._look()

    def begin(self) -> None:
        self._since_s = self._loop.time()

    def end(self) -> None:
        self._since_s = None

    def close(self) -> None:
        self._timer.cancel()

    def raise_error(self) -> None:
        """Raise the error for which the task was cancelled; return if anyone else has cancelled it."""
        if self._error is not None and not self._task.uncancel():
            raise self._error

    def _look(self) -> None:
        now_s, since_s = self._loop.time(), self._since_s
        if since_s is not None and self._end_s is not None and now_s >= self._end_s:
            self._give_up(DeadlineExceededError("the client had not read all tokens at the request's deadline"))
        elif since_s is not None and now_s >= since_s + STALLED_S:
            why = f"the client has read nothing for {STALLED_S:.0f} s: resume the stream when it reads again"
            self._give_up(ResourceExhaustedError(why))
        else:
            next_s = (now_s if since_s is None else since_s) + STALLED_S
            if self._end_s is not None:
                next_s = min(next_s, max(self._end_s, now_s + DELIVERY_GRACE_S))
            self._timer = self._loop.call_at(next_s, self._look)

    def _give_up(self, error: BatonError) -> None:
        self._error = error
        self._task.cancel()
