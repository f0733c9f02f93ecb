"""Events of several prompts as one stream: a slow reader holds the streams back, errors come after what was read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest

from baton.calls.streams import AsyncStream
from baton.errors import UnavailableError
from baton.types import SampledToken, TokenEvent
from gateway.upstream import Answers, Upstream

NUM_STREAMS = 64


class Stream:
    """A server's stream, of which every token has come already."""

    def __init__(self, num_tokens: int, error: Exception | None = None) -> None:
        self.num_read = 0
        self._num_tokens = num_tokens
        self._error = error

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        for index in range(self._num_tokens):
            self.num_read += 1
            yield TokenEvent(index, SampledToken(index), "x", 1)
        if self._error is not None:
            raise self._error


def answers(streams: list[Stream]) -> Answers:
    upstream = cast(Upstream, SimpleNamespace(unless_closed=nullcontext))
    return Answers(cast(list[AsyncStream], streams), upstream)


async def test_what_a_slow_reader_has_not_taken_is_bounded_and_nothing_is_lost() -> None:
    streams = [Stream(100) for _ in range(NUM_STREAMS)]
    got: list[list[int]] = [[] for _ in streams]
    num_taken = 0
    async for number, event in answers(streams).events():
        got[number].append(event.index)
        num_taken += 1
        for _ in range(3):
            await asyncio.sleep(0)  # the streams go on if nothing holds them back
        assert sum(each.num_read for each in streams) <= num_taken + 2 * NUM_STREAMS
    assert got == [list(range(100))] * NUM_STREAMS


@pytest.mark.parametrize("error", [UnavailableError("away"), KeyError("a bug")])
async def test_an_error_comes_once_the_other_streams_have_ended(error: Exception) -> None:
    got: list[int] = []

    async def read() -> None:
        async for number, _ in answers([Stream(3, error), Stream(200)]).events():
            got.append(number)

    with pytest.raises(type(error)):
        await read()
    assert (got.count(0), got.count(1)) == (3, 200)


async def test_a_reader_that_leaves_ends_all_streams() -> None:
    events = answers([Stream(10_000) for _ in range(NUM_STREAMS)]).events()
    await anext(events)
    await asyncio.wait_for(events.aclose(), 60)
    assert asyncio.all_tasks() == {asyncio.current_task()}
