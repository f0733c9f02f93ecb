"""Memory of events that wait for their readers: bounded over all streams, by tenant's share, and lost to no reader."""

from functools import partial

import pytest

from baton.errors import BatonError, ResourceExhaustedError
from baton.results.completion import Usage
from baton.results.timings import Timings
from baton.types import FinishReason, RequestId, SampledToken, TokenEvent, TokenLogprob
from orchestrator.admission.undelivered import Outbox, Outboxes
from orchestrator.requests.record import Event, Finished, Started
from orchestrator.requests.tenants import Tenant

A, B = Tenant("a"), Tenant("b", weight=10.0)
EVENT_BYTES = 421
FINISHED = Finished((FinishReason.LENGTH,), Usage(1, 1, 1, 0), Timings(1, 2, 3, 4, 5))


def token(index: int, **fields: object) -> TokenEvent:
    return TokenEvent(index, SampledToken(7, **fields), "x", 1)  # type: ignore[arg-type]


def never() -> None:
    raise AssertionError("the stream was given up")


def filled(outboxes: Outboxes, tenant: Tenant, num_events: int) -> Outbox:
    outbox = outboxes.open(tenant, lambda: None)
    for index in range(num_events):
        outbox.put(token(index))
    return outbox


async def rest_of(outbox: Outbox) -> list[Event]:
    """The events up to the last one."""
    events = [await outbox.take()]
    while not isinstance(events[-1], Finished):
        events.append(await outbox.take())
    return events


async def test_200_streams_that_are_not_read_keep_within_the_bound_and_one_that_is_read_loses_nothing() -> None:
    outboxes, got = Outboxes(max_bytes=1000 * EVENT_BYTES), []
    ended: list[int] = []
    read = outboxes.open(A, never)
    unread = [outboxes.open(A, partial(ended.append, number)) for number in range(200)]
    read.put(token(0))
    for index in range(300):
        for outbox in unread:
            outbox.put(token(index))
        read.put(token(index + 1))
        got.append(await read.take())
        assert outboxes.num_bytes <= 1000 * EVENT_BYTES
    assert got == [token(index) for index in range(300)]
    assert sorted(ended) == sorted(set(ended))
    assert len(ended) >= 196
    given_up = unread[ended[0]]
    given_up.put(FINISHED)
    [finished] = await rest_of(given_up)
    assert isinstance(finished, Finished)
    assert isinstance(finished.error, ResourceExhaustedError)
    assert "resume it" in str(finished.error)


@pytest.mark.parametrize("ends_first", [True, False], ids=["ended", "running"])
async def test_a_stream_that_is_given_up_keeps_its_end_alone(ends_first: bool) -> None:
    outbox = filled(Outboxes(max_bytes=10 * EVENT_BYTES), A, 9)
    if ends_first:
        outbox.put(FINISHED)
    outbox.put(token(9))
    outbox.put(token(10))
    if not ends_first:
        outbox.put(FINISHED)
    [finished] = await rest_of(outbox)
    assert isinstance(finished, Finished)
    assert finished.error is outbox.refusal is not None


async def test_an_error_of_the_request_is_told_before_that_of_its_reader() -> None:
    outbox, error = filled(Outboxes(max_bytes=10 * EVENT_BYTES), A, 11), BatonError("mine")
    outbox.put(Finished((FinishReason.ERROR,), Usage(1, 1, 1, 0), Timings(1, 2, 3, 4, 5), error))
    [finished] = await rest_of(outbox)
    assert isinstance(finished, Finished)
    assert finished.error is error


def test_the_tenant_with_most_bytes_for_its_weight_gives_up_its_stream_that_was_read_least_recently() -> None:
    outboxes = Outboxes(max_bytes=100 * EVENT_BYTES)
    heavy = filled(outboxes, B, 60)  # 6 for its weight
    first, second = filled(outboxes, A, 1), filled(outboxes, A, 20)
    filled(outboxes, B, 20)
    assert [each.refusal is None for each in (heavy, first, second)] == [True, False, True]


async def test_reading_a_stream_saves_it() -> None:
    outboxes = Outboxes(max_bytes=10 * EVENT_BYTES)
    slow, unread = filled(outboxes, A, 6), filled(outboxes, A, 4)
    await slow.take()
    slow.put(token(6))
    slow.put(token(7))
    assert (slow.refusal, unread.refusal is None) == (None, False)
    assert [await slow.take() for _ in range(7)] == [token(index) for index in range(1, 8)]


@pytest.mark.parametrize(
    ("event", "num_bytes"),
    [
        (token(0, top=(TokenLogprob(1, -0.5),) * 20), EVENT_BYTES + 20 * 160),
        (TokenEvent(0, None, "x" * 5000, 1, prompt=(SampledToken(1, -0.5),) * 100), 420 + 5000 + 100 * 160),
        (Started(RequestId("r"), 1, 1), 420),
    ],
)
async def test_bytes_are_those_in_memory_and_come_back(event: Event, num_bytes: int) -> None:
    outboxes = Outboxes()
    outbox, other = outboxes.open(A, never), outboxes.open(A, never)
    outbox.put(event)
    other.put(event)
    assert outboxes.num_bytes == 2 * num_bytes
    assert await outbox.take() == event
    assert outboxes.num_bytes == num_bytes
    other.close()
    other.put(event)
    other.close()
    assert (outboxes.num_bytes, outboxes._shares) == (0, {})
