"""Many streams on one call: messages that are ready at the same time leave together, in one batch.

`servicer` makes one for each Streams call, on the asyncio loop, and owns it. Rows of a batch get their tokens together,
and one message per step costs its reader less than one per token. A task of its own follows each stream and ends as a
separate call would: when the call is lost, all its streams are.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.errors import BatonError, InvalidArgumentError
from baton.ids import StreamNumber

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Said(Generic[T]):
    """A stream's next message, or its end."""

    number: StreamNumber
    message: T | None
    """Payload of the message. None: the stream of this number has ended."""
    error: BatonError | None = None
    """Error that the stream ended with, if it failed."""


class SharedStream(Generic[T]):
    """The streams of one call, merged into batches."""

    def __init__(self) -> None:
        self._tasks: dict[StreamNumber, asyncio.Task[None]] = {}
        self._said: list[Said[T]] = []
        self._changed = asyncio.Event()
        self._is_complete = False

    def add(self, number: StreamNumber, messages: AsyncGenerator[T, None]) -> None:
        """Follow a stream until it ends, is left, or the call is lost; then close `messages`. A number in use gets an
        error."""
        if number in self._tasks:
            self._say(Said(number, None, InvalidArgumentError(f"number {number} is taken: number streams anew")))
            return
        task = self._tasks[number] = asyncio.create_task(self._follow(number, messages))
        task.add_done_callback(lambda _: self._forget(number))  # also when the stream is left before its task began

    def leave(self, number: StreamNumber) -> None:
        """Stop following a stream whose reader has gone. Without effect when the stream has ended."""
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    def complete(self) -> None:
        """Note that no further stream will be added."""
        self._is_complete = True
        self._changed.set()

    async def batches(self) -> AsyncGenerator[list[Said[T]], None]:
        """Yield the messages since the last batch; return when all streams have ended and no more will be added."""
        while self._said or self._tasks or not self._is_complete:
            if self._said:
                batch, self._said = self._said, []
                yield batch
            else:
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        """Cancel all streams that still run, since their call is over, and wait for them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, number: StreamNumber) -> None:
        del self._tasks[number]
        self._changed.set()

    def _say(self, said: Said[T]) -> None:
        self._said.append(said)
        self._changed.set()

    async def _follow(self, number: StreamNumber, messages: AsyncGenerator[T, None]) -> None:
        error: BatonError | None = None
        try:
            async with aclosing(messages):
                async for message in messages:
                    self._say(Said(number, message))
        except BatonError as failure:
            error = failure.with_traceback(None)  # it outlives what its frames hold
        except Exception:
            logger.exception("stream %d failed", number)
            error = BatonError(f"stream {number} failed in the generation group: its log has the traceback")
        self._say(Said(number, None, error))
