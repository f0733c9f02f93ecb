"""Sends an open-loop or closed-loop load and records the outcome of each request. Runs on the event loop.

In an open loop, conversations begin at their scheduled times, regardless of earlier answers, and latencies count from
the scheduled time. Each turn of a conversation waits for the previous answer. In a closed loop, each user sends its
next request as soon as its previous request is answered.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import process_time

from baton.process.clock import Clock
from baton_lab.bench.conversations import Conversation
from baton_lab.bench.records import MessageLog, Record, RequestFailedError
from baton_lab.bench.server import Message, Server

_AFTER_FAILURE_S = 1.0
"""Seconds that a closed-loop user waits after a failed request. The pause avoids flooding an unavailable server with
requests."""


@dataclass(frozen=True)
class Arrivals:
    """Open-loop load: the start time of each conversation."""

    name: str
    rate: float
    """Mean number of conversations that begin per second."""
    at_s: Sequence[float]
    """Start times in seconds since the start of the load, ascending."""


@dataclass(frozen=True)
class Users:
    """Closed-loop load: the number of simulated users, and the limits of the load."""

    name: str
    num_users: int
    num_conversations: int | None = None
    """Maximum number of conversations of all users together. None: only `seconds` limits the load."""
    seconds: float = float("inf")
    """Duration in seconds after which no new conversation begins."""


Load = Arrivals | Users


@dataclass
class Run:
    """Records of one load. Only the event loop's thread may access them until the load has ended."""

    load: Load
    records: list[Record] = field(default_factory=list)
    num_unasked: int = 0
    """Number of turns that were not sent because an earlier turn of their conversation failed."""
    seconds: float = 0.0
    """Seconds from the start of the load to the end of the last answer."""
    used_s: float = 0.0
    """CPU seconds that this process used during the load."""


class Generator:
    """Load generator that sends loads to one server, one after the other."""

    def __init__(self, server: Server, clock: Clock, ended: Callable[[Record], None] = lambda record: None) -> None:
        """Create a generator for one server. `ended` is called on the event loop with the record of each finished
        request; it must return quickly."""
        self._server = server
        self._clock = clock
        self._ended = ended

    async def run(self, load: Load, conversations: Iterator[Conversation]) -> Run:
        """Send one load and return its records when all answers have ended. The load takes its conversations from the
        iterator `conversations`. Raises the exceptions of this iterator."""
        # Made in advance, so that no arrival waits for its prompt.
        ready = [next(conversations) for _ in load.at_s] if isinstance(load, Arrivals) else []
        run, start_s, used_s = Run(load), self._clock.now_s(), process_time()
        try:
            if isinstance(load, Arrivals):
                await self._open(run, load, ready, start_s)
            else:
                await self._closed(run, load, conversations, start_s)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        run.seconds = self._clock.now_s() - start_s
        run.used_s = process_time() - used_s
        return run

    async def _open(self, run: Run, load: Arrivals, ready: Sequence[Conversation], start_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for at_s, conversation in zip(load.at_s, ready, strict=True):
                await asyncio.sleep(start_s + at_s - self._clock.now_s())  # the arrival process itself
                tasks.create_task(self._converse(run, conversation, start_s, at_s))

    async def _closed(self, run: Run, load: Users, conversations: Iterator[Conversation], start_s: float) -> None:
        left = iter(range(load.num_conversations)) if load.num_conversations is not None else None

        async def ask() -> None:
            while (now_s := self._clock.now_s() - start_s) < load.seconds:
                if left is not None and next(left, None) is None:
                    return
                if not await self._converse(run, next(conversations), start_s, now_s):
                    await asyncio.sleep(_AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(load.num_users):
                tasks.create_task(ask())

    async def _converse(self, run: Run, conversation: Conversation, start_s: float, due_s: float) -> bool:
        """Send the turns of a conversation, each with all earlier messages, until one fails. Return whether all were
        answered."""
        messages: list[Message] = [("system", conversation.system)] if conversation.system else []
        for number, turn in enumerate(conversation.turns):
            if number:
                due_s = self._clock.now_s() - start_s + turn.think_s
                await asyncio.sleep(turn.think_s)  # the user's own pause
            messages.append(("user", turn.text))
            log = MessageLog(lambda: self._clock.now_s() - start_s)
            place = _Place(conversation.number, number, due_s, turn.max_tokens)
            record = await self._ask(messages, place, log)
            run.records.append(record)
            self._ended(record)
            if not record.is_answered:
                run.num_unasked += len(conversation.turns) - number - 1
                return False
            messages.append(("assistant", log.text))
        return True

    async def _ask(self, messages: list[Message], place: "_Place", log: MessageLog) -> Record:
        """Send one request and return its record, also if the request fails."""
        sent_s, counts, failure, explanation = log.now_s(), None, "", ""
        try:
            counts = await self._server.ask(messages, place.max_tokens, log)
        except RequestFailedError as error:
            failure, explanation = error.kind, str(error)
        return Record(
            conversation=place.conversation,
            turn=place.turn,
            due_s=place.due_s,
            sent_s=sent_s,
            end_s=log.now_s(),
            max_tokens=place.max_tokens,
            message_s=tuple(log.message_s),
            counts=counts,
            failure=failure,
            explanation=explanation,
        )


@dataclass(frozen=True)
class _Place:
    """Fields of a request's record that are known before the request is sent: the index of its conversation, the index
    of the turn in the conversation, the scheduled time, and the maximum number of output tokens."""

    conversation: int
    turn: int
    due_s: float
    max_tokens: int
