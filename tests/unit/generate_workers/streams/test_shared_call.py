"""Streams that share a call: what is said together leaves together, each ends by itself, a lost call loses all."""

import asyncio
from collections.abc import AsyncGenerator

from baton.errors import InvalidArgumentError, NotFoundError
from baton.ids import StreamNumber
from generate_workers.streams.shared_call import Said, SharedStream

ONE, TWO = StreamNumber(1), StreamNumber(2)


class Source:
    """A stream whose test says what it says."""

    def __init__(self) -> None:
        self.words: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.was_closed = False

    def say(self, *words: str | Exception | None) -> None:
        for word in words:
            self.words.put_nowait(word)

    async def messages(self) -> AsyncGenerator[str, None]:
        try:
            while (word := await self.words.get()) is not None:
                if isinstance(word, Exception):
                    raise word
                yield word
        except asyncio.CancelledError:
            self.was_closed = True
            raise


async def settled() -> None:
    """Whatever can run has."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_said_together_is_one_batch() -> None:
    shared, sources = SharedStream[str](), (Source(), Source())
    for number, source in zip((ONE, TWO), sources, strict=True):
        shared.add(number, source.messages())
        source.say("a")
    await settled()
    batches = shared.batches()
    assert await anext(batches) == [Said(ONE, "a"), Said(TWO, "a")]
    for source in sources:
        source.say("b", None)
    shared.complete()
    rest = [said async for batch in batches for said in batch]
    assert [said for said in rest if said.number == ONE] == [Said(ONE, "b"), Said(ONE, None)]
    assert len(rest) == 4


async def test_an_error_is_the_end_of_its_stream_only() -> None:
    shared, bad, good = SharedStream[str](), Source(), Source()
    shared.add(ONE, bad.messages())
    shared.add(TWO, good.messages())
    failure = NotFoundError("not kept here")
    bad.say(failure)
    good.say("a", None)
    shared.complete()
    said = [each async for batch in shared.batches() for each in batch]
    assert Said(ONE, None, failure) in said and [each for each in said if each.number == TWO] == [
        Said(TWO, "a"),
        Said(TWO, None),
    ]


async def test_a_bug_is_an_error_of_its_stream() -> None:
    shared, source = SharedStream[str](), Source()
    shared.add(ONE, source.messages())
    source.say(ZeroDivisionError("oops"))
    shared.complete()
    ((said,),) = [batch async for batch in shared.batches()]
    assert said.message is None and "log has the traceback" in str(said.error)


async def test_a_stream_that_is_left_is_closed_and_says_no_more() -> None:
    shared, source = SharedStream[str](), Source()
    shared.add(ONE, source.messages())
    await settled()
    shared.leave(ONE)
    shared.leave(ONE)
    shared.complete()
    assert [batch async for batch in shared.batches()] == []
    assert source.was_closed


async def test_a_stream_that_is_left_at_once_never_begins() -> None:
    shared, source = SharedStream[str](), Source()
    shared.add(ONE, source.messages())
    shared.leave(ONE)
    shared.complete()
    assert [batch async for batch in shared.batches()] == []
    assert not source.was_closed


async def test_a_number_is_one_stream_s() -> None:
    shared, first, second = SharedStream[str](), Source(), Source()
    shared.add(ONE, first.messages())
    shared.add(ONE, second.messages())
    ((said,),) = [await anext(shared.batches())]
    assert isinstance(said.error, InvalidArgumentError)
    await shared.close()


async def test_a_lost_call_loses_all() -> None:
    shared, sources = SharedStream[str](), (Source(), Source())
    for number, source in zip((ONE, TWO), sources, strict=True):
        shared.add(number, source.messages())
    await settled()
    await shared.close()
    assert [source.was_closed for source in sources] == [True, True]
