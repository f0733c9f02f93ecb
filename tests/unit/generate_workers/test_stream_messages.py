"""Batches of many streams' events as messages: whole, in order, and of a size that their reader takes."""

from baton.errors import ResourceExhaustedError
from baton.limits import MAX_MESSAGE_BYTES
from baton.types import StreamNumber
from baton.v1 import generate_pb2
from generate_workers.servicer import _end_to_proto, messages_of


def said(number: int, text: str) -> generate_pb2.StreamEvent:
    return generate_pb2.StreamEvent(number=number, event=generate_pb2.TokenEvent(text=text))


def test_a_step_s_events_are_one_message() -> None:
    (message,) = messages_of([said(number, "word") for number in range(500)])
    assert [(event.number, event.event.text) for event in message.events] == [(each, "word") for each in range(500)]
    assert not any(event.HasField("end") for event in message.events)


def test_large_events_are_spread_over_messages() -> None:
    batch = [said(number, "x" * 700_000) for number in range(40)]
    messages = list(messages_of(batch))
    assert len(messages) > 1 and all(message.ByteSize() < MAX_MESSAGE_BYTES / 8 for message in messages)
    assert [event.number for message in messages for event in message.events] == list(range(40))


def test_an_end_says_why() -> None:
    full = ResourceExhaustedError("full", retry_after_s=2.0)
    well, failed = _end_to_proto(StreamNumber(1), None), _end_to_proto(StreamNumber(2), full)
    assert well.HasField("end") and not well.end.error and not well.HasField("event")
    assert (failed.end.error, failed.end.text, failed.end.retry_after_s) == ("ResourceExhaustedError", "full", 2.0)
