"""Many streams on one call: what they say at the same time leaves together, in one message.

Last step of a request's way (DESIGN.md, section 4): rows of a batch get their tokens together, and one message a step
costs its reader less than one a token. Each stream is followed by a task of its own, which ends as a call of its own
would have: when the call is lost, all are. Owned by the call's handler, on the loop.
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
    """One stream's next message, or its end."""

    number: StreamNumber
    message: T | None
    """None: nothing follows of this number."""
    error: BatonError | None = None
    """What the stream ended with, if it failed."""


class SharedStream(Generic[T]):
    """The streams of one call."""

    def __init__(self) -> None:
        self._tasks: dict[StreamNumber, asyncio.Task[None]] = {}
        self._said: list[Said[T]] = []
        self._changed = asyncio.Event()
        self._is_complete = False

    def add(self, number: StreamNumber, messages: AsyncGenerator[T, None]) -> None:
        """Follows a stream to its end; closes it when it is left, or the call is lost."""
        if number in self._tasks:
            self._say(Said(number, None, InvalidArgumentError(f"number {number} is taken: number streams anew")))
            return
        task = self._tasks[number] = asyncio.create_task(self._follow(number, messages))
        task.add_done_callback(lambda _: self._forget(number))  # also if it was left before it began

    def leave(self, number: StreamNumber) -> None:
        """Nobody reads that stream any more; without effect when it has ended."""
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    def complete(self) -> None:
        """No stream will be added."""
        self._is_complete = True
        self._changed.set()

    async def batches(self) -> AsyncGenerator[list[Said[T]], None]:
        """What has been said since the last batch; ends when all streams have, and none will be added."""
        while self._said or self._tasks or not self._is_complete:
            if self._said:
                batch, self._said = self._said, []
                yield batch
            else:
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        """The call is over: streams that run are lost."""
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
