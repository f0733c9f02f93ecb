"""Batches of many streams' events as messages: whole, in order, and of a size that their reader takes."""

from baton.errors import ResourceExhaustedError
from baton.limits import MAX_MESSAGE_BYTES
from baton.proto_types import columns_from_proto, event_from_proto
from baton.types import DraftRound, FinishReason, SampledToken, StreamNumber, TokenEvent
from baton.v1 import generate_pb2
from generate_workers.stream_messages import encode_end, encode_event, messages_of


def said(number: int, text: str) -> generate_pb2.StreamEvent:
    return generate_pb2.StreamEvent(number=number, event=generate_pb2.TokenEvent(text=text))


def test_a_step_s_events_are_one_message() -> None:
    (message,) = messages_of([said(number, "word") for number in range(500)])
    assert [(event.number, event.event.text) for event in message.events] == [(each, "word") for each in range(500)]
    assert not any(event.HasField("end") for event in message.events)


def test_tokens_of_a_step_are_columns_and_stay_in_order() -> None:
    """A token with logprobs or drafts is an event; what follows it in its stream is one, too, for columns are read
    first."""
    drafts = DraftRound("ngram", 2, 1, 2)
    said = [
        (1, TokenEvent(0, SampledToken(5), "a", 10)),
        (2, TokenEvent(4, SampledToken(6), "", 10, choice=3)),
        (1, TokenEvent(1, SampledToken(7), "b", 11, drafts=drafts)),
        (3, TokenEvent(0, SampledToken(8, -0.5), "c", 12)),
        (1, TokenEvent(2, SampledToken(9), "d", 13, FinishReason.STOP)),
        (2, TokenEvent(5, SampledToken(2), "é", 14, FinishReason.LENGTH, choice=3)),
        (4, TokenEvent(7, None, "", 15, FinishReason.ERROR, "broken")),
    ]
    (message,) = messages_of([encode_event(StreamNumber(number), event) for number, event in said])
    assert len(message.tokens.numbers) == 3
    received = list(columns_from_proto(message.tokens))
    received += [(each.number, event_from_proto(each.event)) for each in message.events]
    for stream in (1, 2, 3, 4):
        assert [event for number, event in received if number == stream] == [
            event for number, event in said if number == stream
        ]


def test_columns_of_a_call_that_was_not_read_are_spread_over_messages() -> None:
    said = [
        (StreamNumber(number), TokenEvent(index, SampledToken(7), "x" * 900, 1))
        for index in range(40)
        for number in range(40)
    ]
    messages = list(messages_of([encode_event(*each) for each in said]))
    assert len(messages) > 1 and all(message.ByteSize() <= 2**20 for message in messages)
    assert [each for message in messages for each in columns_from_proto(message.tokens)] == said


def test_large_events_are_spread_over_messages() -> None:
    batch = [said(number, "x" * 700_000) for number in range(40)]
    messages = list(messages_of(batch))
    assert len(messages) > 1 and all(message.ByteSize() < MAX_MESSAGE_BYTES / 8 for message in messages)
    assert [event.number for message in messages for event in message.events] == list(range(40))


def test_an_end_says_why() -> None:
    full = ResourceExhaustedError("full", retry_after_s=2.0)
    well, failed = encode_end(StreamNumber(1), None), encode_end(StreamNumber(2), full)
    assert well.HasField("end") and not well.end.error and not well.HasField("event")
    assert (failed.end.error, failed.end.text, failed.end.retry_after_s) == ("ResourceExhaustedError", "full", 2.0)
