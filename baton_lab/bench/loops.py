"""Sends a load, open or closed, and records the outcome of each request. On the loop.

In an open loop, conversations begin when they are due, regardless of earlier ones: a late answer delays no arrival, and
latencies count from the instant at which a request was due. The turns of one conversation wait for each other, as those
of a person do. In a closed loop, each of a number of users sends the next request as soon as the last one was answered.
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
"""Seconds after a failure until a user of a closed loop sends again, so that an absent server is not flooded."""


@dataclass(frozen=True)
class Arrivals:
    """An open loop: when each conversation begins."""

    name: str
    rate: float
    """Conversations that begin a second, in the mean."""
    at_s: Sequence[float]
    """Instants in seconds from the load's start, ascending."""


@dataclass(frozen=True)
class Users:
    """Closed loop: the number of users, and how long they send requests."""

    name: str
    num_users: int
    num_conversations: int | None = None
    """Conversations of all users, at most; None: as many as fit in the time."""
    seconds: float = float("inf")
    """Seconds after which no conversation begins."""


Load = Arrivals | Users


@dataclass
class Run:
    """Records of a load. Belongs to the loop until the load has ended."""

    load: Load
    records: list[Record] = field(default_factory=list)
    num_unasked: int = 0
    """Turns that were not sent because an earlier turn of their conversation failed."""
    seconds: float = 0.0
    """Seconds from the load's start until the last answer had ended."""
    used_s: float = 0.0
    """Processor seconds that this process used meanwhile."""


class Generator:
    """Sends loads to one server, one load after the other."""

    def __init__(self, server: Server, clock: Clock, ended: Callable[[Record], None] = lambda record: None) -> None:
        """`ended` is called with each record, on the loop: it must be quick."""
        self._server = server
        self._clock = clock
        self._ended = ended

    async def run(self, load: Load, conversations: Iterator[Conversation]) -> Run:
        """Send a load of the next conversations and return when all answers have ended. Raises what `conversations`
        raises."""
        # No arrival waits until its prompt is made.
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
        """Send one request and return its record, also when it fails."""
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
    """Fields of a request's record that are known before it is sent."""

    conversation: int
    turn: int
    due_s: float
    max_tokens: int
