"""Messages with the events of many streams, which a generation group sends on one gRPC call (`streams.shared_reader`).

Most events are a token and its text. All such tokens of a step are sent as columns of one message. This needs much less
processor time than a message for each token.
"""

from collections.abc import Iterable, Iterator

from baton.errors import BatonError, InvalidArgumentError, ResourceExhaustedError
from baton.limits import MAX_MESSAGE_BYTES
from baton.modeling.prefix_store.store import Filled
from baton.proto_types import columns_to_proto, event_to_proto, fits_columns
from baton.rpc_status import MAX_TEXT_CHARS, name_of
from baton.types import StreamNumber, TokenEvent
from baton.v1 import generate_pb2

_MESSAGE_BYTES = 2**20
"""Maximum number of bytes of a message that has events of several streams. A message with a single event may be
larger."""
_MAX_EVENT_BYTES = MAX_MESSAGE_BYTES - 2**16
"""Maximum number of bytes of a single event. Every service between the engine and the client must be able to send the
event in one of its messages."""
_TOKEN_BYTES = 40
"""Maximum number of bytes of a token in columns, without its text."""
StreamMessage = generate_pb2.StreamEvent | tuple[StreamNumber, TokenEvent]
"""Event or end of one stream. A pair is an event that fits into columns."""


def messages_of(batch: Iterable[StreamMessage]) -> Iterator[generate_pb2.StreamEvents]:
    """Yield the contents of a batch in messages of limited size. The contents of each stream stay in order. A batch
    needs several messages only if it contains large logprobs of prompts, or if the call was not read for a while."""
    tokens, events, num_bytes = list[tuple[StreamNumber, TokenEvent]](), list[generate_pb2.StreamEvent](), 0
    numbers = set[int]()
    """Numbers of the streams in `events`. Their further tokens must follow there, because columns are read first."""
    for each in batch:
        if isinstance(each, tuple) and each[0] in numbers:
            each = generate_pb2.StreamEvent(number=each[0], event=event_to_proto(each[1]))
        size = _TOKEN_BYTES + 4 * len(each[1].text) if isinstance(each, tuple) else each.ByteSize()
        if num_bytes and num_bytes + size > _MESSAGE_BYTES:
            yield generate_pb2.StreamEvents(events=events, tokens=columns_to_proto(tokens))
            tokens, events, num_bytes = [], [], 0
            numbers.clear()
        num_bytes += size
        if isinstance(each, tuple):
            tokens.append(each)
        else:
            events.append(each)
            numbers.add(each.number)
    yield generate_pb2.StreamEvents(events=events, tokens=columns_to_proto(tokens))


def encode_event(number: StreamNumber, event: TokenEvent | Filled) -> StreamMessage:
    """Return the message of an event, or of the stored blocks of a stream's answers. Raises InvalidArgumentError for an
    event that is too large for a message, so that only this stream of the shared call ends."""
    if isinstance(event, Filled):
        stored = generate_pb2.StoredBlocks(stored=event.stored, evicted=event.evicted)
        return generate_pb2.StreamEvent(number=number, event=generate_pb2.TokenEvent(stored=stored))
    if fits_columns(event):
        event.text.encode()  # raises for a text that the message could not contain, so that only this stream ends
        return number, event
    message = generate_pb2.StreamEvent(number=number, event=event_to_proto(event))
    if event.prompt and message.ByteSize() > _MAX_EVENT_BYTES:
        raise InvalidArgumentError(
            f"prompt_logprobs of {len(event.prompt)} tokens take more than {_MAX_EVENT_BYTES} bytes: ask for fewer, or "
            "send a shorter prompt"
        )
    return message


def encode_end(number: StreamNumber, error: BatonError | None) -> generate_pb2.StreamEvent:
    """Return the message of the end of a stream. `error`: error with which the stream failed; None: it did not fail."""
    if error is None:
        return generate_pb2.StreamEvent(number=number, end=generate_pb2.StreamEnd())
    retry_s = error.retry_after_s if isinstance(error, ResourceExhaustedError) else None
    text = str(error)[:MAX_TEXT_CHARS]
    end = generate_pb2.StreamEnd(error=name_of(error), text=text, retry_after_s=retry_s or 0.0)
    return generate_pb2.StreamEvent(number=number, end=end)
