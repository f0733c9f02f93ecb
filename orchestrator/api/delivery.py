"""Writes the messages of a stream to its client, and ends the call of a client that does not read.

Used by `orchestrator.api.frontend` and `orchestrator.api.gateway`. gRPC blocks a write until the client has read enough
of the earlier messages. If the client never reads, the write blocks forever. A slow client is not affected as long as
no single write blocks for `STALLED_S` seconds. Runs on the asyncio loop.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from baton.errors import BatonError, DeadlineExceededError, ResourceExhaustedError
from baton.limits import DELIVERY_GRACE_S, STALLED_S


class MessageWriter(Protocol):
    """Interface for sending messages to a client. grpc.aio's ServicerContext implements it."""

    async def write(self, message: Any) -> None:
        """Send a message. Waits until the client has read enough of the earlier messages."""


async def deliver(context: MessageWriter, messages: AsyncIterator[Any], left_s: float | None) -> None:
    """Write each message to the client as soon as it arrives. `left_s` is the number of seconds until the request's
    deadline; None for no deadline.

    Raises ResourceExhaustedError if a write has blocked for `STALLED_S` seconds. Raises DeadlineExceededError if a
    write still blocks `DELIVERY_GRACE_S` seconds after the deadline. Also raises the errors of `messages`.
    """
    watch = _Watch(left_s)
    try:
        async for message in messages:
            watch.begin()
            await context.write(message)
            watch.end()
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error  # the client has disconnected during a write
    except asyncio.CancelledError:
        watch.raise_error()
        raise
    finally:
        watch.close()


class _Watch:
    """Timer that cancels the current task if one of its writes takes too long. One timer is used for all messages of a
    stream."""

    def __init__(self, left_s: float | None) -> None:
        task = asyncio.current_task()
        assert task is not None, "made in a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._end_s = None if left_s is None else self._loop.time() + left_s + DELIVERY_GRACE_S
        self._since_s: float | None = None
        """Time, on the loop's clock, at which the present write began; None if no write is in progress."""
        self._error: BatonError | None = None
        """Error of the write that took too long, set when this object cancels the task; None before."""
        self._look()

    def begin(self) -> None:
        self._since_s = self._loop.time()

    def end(self) -> None:
        self._since_s = None

    def close(self) -> None:
        self._timer.cancel()

    def raise_error(self) -> None:
        """Raise the error of the write that took too long, if this object has cancelled the task for that reason. Does
        nothing if this object has not cancelled the task, or if the task was cancelled by another caller as well."""
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
