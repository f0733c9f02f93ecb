"""One question for all consoles of a caller, asked only when somebody looks, and whose failure is no other's."""

import asyncio
from collections.abc import Mapping

import pytest

from baton.errors import UnavailableError
from gateway.console.feed import FRESH_S, MAX_CALLERS, Feed
from tests.support.manual_clock import ManualClock

ANA, BEN = {"authorization": "Bearer ana"}, {"authorization": "Bearer ben"}


class Server:
    """Answers with the number of the question, when it is let."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, str]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: UnavailableError | None = None

    async def ask(self, caller: Mapping[str, str]) -> int:
        self.asked.append(caller)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return len(self.asked)


async def test_an_answer_holds_for_a_second_and_nothing_is_asked_by_itself() -> None:
    server, clock = Server(), ManualClock()
    feed = Feed(server.ask, clock)
    assert server.asked == []
    assert [await feed.latest({}) for _ in range(3)] == [1, 1, 1]
    clock.advance(FRESH_S)
    assert len(server.asked) == 1
    assert await feed.latest({}) == 2


async def test_consoles_that_ask_at_once_share_a_question() -> None:
    server = Server()
    feed = Feed(server.ask, ManualClock())
    server.may_answer.clear()
    asking = [asyncio.create_task(feed.latest({})) for _ in range(5)]
    await asyncio.sleep(0)
    server.may_answer.set()
    assert await asyncio.gather(*asking) == [1] * 5


async def test_callers_are_not_told_what_others_are() -> None:
    server = Server()
    feed = Feed(server.ask, ManualClock())
    assert (await feed.latest(ANA), await feed.latest(BEN), await feed.latest(ANA)) == (1, 2, 1)
    assert server.asked == [ANA, BEN]


async def test_an_error_holds_as_long_and_is_forgotten_then() -> None:
    server, clock = Server(), ManualClock()
    feed = Feed(server.ask, clock)
    server.error = UnavailableError("away")
    for _ in range(2):
        with pytest.raises(UnavailableError, match="away"):
            await feed.latest({})
    assert len(server.asked) == 1
    server.error = None
    clock.advance(FRESH_S)
    assert await feed.latest({}) == 2


async def test_a_console_that_leaves_while_it_asks_leaves_the_question_to_the_next() -> None:
    server = Server()
    feed = Feed(server.ask, ManualClock())
    server.may_answer.clear()
    first, second = (asyncio.create_task(feed.latest({})) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    server.may_answer.set()
    assert await second == 2 and first.cancelled()


async def test_only_so_many_callers_are_kept() -> None:
    server = Server()
    feed = Feed(server.ask, ManualClock())
    for number in range(MAX_CALLERS + 1):
        await feed.latest({"authorization": str(number)})
    assert len(feed._latest) == MAX_CALLERS
    assert await feed.latest({"authorization": "0"}) == MAX_CALLERS + 2, "the oldest was forgotten"
