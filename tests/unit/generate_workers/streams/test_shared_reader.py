"""Streams that share a call: what is said together leaves together, each ends by itself, a lost call loses all."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from baton.errors import BatonError, InvalidArgumentError, NotFoundError
from baton.modeling.prefix_store.store import Filled
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, RequestId, SampledToken, StreamNumber, TokenEvent
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.rows import EventSink, GenerationRequest, StreamId
from generate_workers.streams.open_streams import OpenStream, OpenStreams
from generate_workers.streams.shared_reader import SharedReader

ONE, TWO = StreamNumber(1), StreamNumber(2)
KEEP_S = 60.0


def event(text: str, index: int, finish: FinishReason | None) -> TokenEvent:
    return TokenEvent(index, SampledToken(index), text, 0, finish)


@dataclass(frozen=True)
class Said:
    """The text of a stream's event, or its end."""

    number: StreamNumber
    message: str | None
    error: BatonError | None = None


def encoded(number: StreamNumber, message: TokenEvent | Filled) -> Said:
    """The message of an event; the marked ones cannot be sent."""
    assert isinstance(message, TokenEvent)
    if message.text == "large":
        raise InvalidArgumentError("too large")
    if message.text == "bug":
        raise ZeroDivisionError("oops")
    return Said(number, message.text)


def end(number: StreamNumber, error: BatonError | None) -> Said:
    return Said(number, None, error)


class Engine:
    """An engine whose test says what it says."""

    def __init__(self) -> None:
        self.cancelled: list[StreamId] = []
        self._sinks: list[EventSink] = []
        self._num_said = Counter[int]()

    def submit(self, _: GenerationRequest, on_event: EventSink, *_rest: Any) -> StreamId:
        self._sinks.append(on_event)
        return StreamId(len(self._sinks))

    def cancel(self, stream_id: StreamId) -> None:
        self.cancelled.append(stream_id)

    def say(self, stream_id: int, *words: str, end: str | None = None) -> None:
        said = [(word, None) for word in words] + ([(end, FinishReason.LENGTH)] if end is not None else [])
        for text, finish in said:
            self._sinks[stream_id - 1](event(text, self._num_said[stream_id], finish))
            self._num_said[stream_id] += 1


class Call:
    """A call's reader, and the streams that it opens."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.streams = OpenStreams(cast(GenerationEngine, self.engine))
        self.reader = SharedReader(self.streams, encoded, end)

    def opening(self, number: StreamNumber) -> Callable[[Callable[[], None]], OpenStream]:
        request = GenerationRequest(RequestId(f"r{number}"), (1,), (), SamplingParams(max_tokens=4))
        return lambda on_message: self.streams.open(request, number, KEEP_S, on_message)

    def open(self, *numbers: StreamNumber) -> None:
        for number in numbers:
            self.reader.add(number, self.opening(number))

    async def rest(self) -> list[Said]:
        """Messages of the call from now on, if nothing more is opened."""
        self.reader.complete()
        return [said async for batch in self.reader.batches() for said in batch]


@pytest.fixture
async def call() -> Call:
    return Call()


async def settled() -> None:
    """Whatever can run has."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_said_together_is_one_batch(call: Call) -> None:
    call.open(ONE, TWO)
    call.engine.say(1, "a")
    call.engine.say(2, "a")
    batches = call.reader.batches()
    assert await anext(batches) == [Said(ONE, "a"), Said(TWO, "a")]
    for stream_id in (1, 2):
        call.engine.say(stream_id, end="b")
    call.reader.complete()
    assert await anext(batches) == [Said(ONE, "b"), Said(ONE, None), Said(TWO, "b"), Said(TWO, None)]
    assert [batch async for batch in batches] == []


async def test_what_comes_while_the_call_sends_waits_in_the_logs(call: Call) -> None:
    call.open(ONE, TWO)
    call.engine.say(1, "a")
    batches = call.reader.batches()
    assert await anext(batches) == [Said(ONE, "a")]
    for word in "bc":  # two steps
        call.engine.say(2, word)
        call.engine.say(1, word)
        await settled()
    assert await anext(batches) == [Said(TWO, "b"), Said(TWO, "c"), Said(ONE, "b"), Said(ONE, "c")]
    call.reader.close()


async def test_a_stream_that_cannot_be_opened_is_an_end_of_it_only(call: Call) -> None:
    failure = NotFoundError("not kept here")

    def refuse(on_message: Callable[[], None]) -> OpenStream:
        raise failure

    call.reader.add(ONE, refuse)
    call.open(TWO)
    call.engine.say(1, end="a")
    assert await call.rest() == [Said(ONE, None, failure), Said(TWO, "a"), Said(TWO, None)]


async def test_an_event_that_cannot_be_sent_ends_its_stream_only(call: Call) -> None:
    call.open(ONE, TWO)
    call.engine.say(1, "a", "large", "b")
    first, failed = await anext(call.reader.batches())
    assert (first, failed.number, failed.message, str(failed.error)) == (Said(ONE, "a"), ONE, None, "too large")
    call.engine.say(1, end="c")  # before it hears that it is cancelled
    call.engine.say(2, "a", end="b")
    assert await call.rest() == [Said(TWO, "a"), Said(TWO, "b"), Said(TWO, None)]
    assert call.engine.cancelled == [StreamId(1)]


async def test_a_bug_is_an_error_of_its_stream(call: Call) -> None:
    call.open(ONE)
    call.engine.say(1, "bug")
    [said] = await call.rest()
    assert said.message is None and "log has the traceback" in str(said.error)


async def test_a_stream_that_is_left_is_lost_and_says_no_more(call: Call) -> None:
    call.open(ONE)
    call.engine.say(1, "a")
    await settled()
    call.reader.leave(ONE)
    call.reader.leave(ONE)
    assert await call.rest() == []
    assert [request_id for request_id, _ in call.streams.kept()] == ["r1"]
    call.streams.close()


async def test_a_stream_that_is_left_before_its_first_token_ends(call: Call) -> None:
    call.open(ONE)
    call.reader.leave(ONE)
    assert await call.rest() == []
    assert (call.engine.cancelled, call.streams.kept()) == ([StreamId(1)], [])


async def test_a_number_is_one_stream_s(call: Call) -> None:
    call.open(ONE, ONE)
    [said] = await anext(call.reader.batches())
    assert isinstance(said.error, InvalidArgumentError)
    call.reader.close()
    assert call.engine.cancelled == [StreamId(1)]


async def test_a_lost_call_loses_all(call: Call) -> None:
    call.open(ONE, TWO)
    for stream_id in (1, 2):
        call.engine.say(stream_id, "a")
    await settled()
    call.reader.close()
    assert sorted(request_id for request_id, _ in call.streams.kept()) == ["r1", "r2"]
    call.streams.close()


async def test_an_end_that_was_sent_is_kept_until_its_reader_leaves_the_stream(call: Call) -> None:
    call.open(ONE, TWO)
    for stream_id in (1, 2):
        call.engine.say(stream_id, end="a")
    sent = [said for batch in [await anext(call.reader.batches())] for said in batch]
    assert sent == [Said(ONE, "a"), Said(ONE, None), Said(TWO, "a"), Said(TWO, None)]
    call.reader.leave(ONE)
    call.reader.close()
    assert call.streams.kept() == [("r2", 0)]
    request = GenerationRequest(RequestId("r2"), (1,), (), SamplingParams(max_tokens=4))
    second = SharedReader(call.streams, encoded, end)
    second.add(TWO, lambda on_message: call.streams.take_over(request, TWO, [()], on_message))
    assert await anext(second.batches()) == [Said(TWO, "a"), Said(TWO, None)]
    second.leave(TWO)
    second.close()
    assert (call.streams.kept(), call.engine.cancelled) == ([], [])


async def test_another_call_reads_on_from_the_log(call: Call) -> None:
    call.open(ONE)
    call.engine.say(1, "a", "b", "c")
    await settled()
    call.reader.close()
    request = GenerationRequest(RequestId("r1"), (1,), (), SamplingParams(max_tokens=4))
    second = SharedReader(call.streams, encoded, end)
    second.add(TWO, lambda on_message: call.streams.take_over(request, TWO, [(0,)], on_message))
    assert await anext(second.batches()) == [Said(TWO, "b"), Said(TWO, "c")]
    call.engine.say(1, end="d")
    second.complete()
    assert [said async for batch in second.batches() for said in batch] == [Said(TWO, "d"), Said(TWO, None)]
