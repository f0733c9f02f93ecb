"""Encodes and decodes the protobuf message KvPiece. The payload is copied once when it is sent, and not copied when it
is received.

The payload is the last field of KvPiece, so an encoded message is a short prefix followed by the payload. The encoding
is standard protobuf: other clients may send a KvPiece that their own library has encoded. `baton.transport.kv_sender`
uses this module to serialize pushed pieces, and `baton.transport.kv_receiver` uses it to deserialize them. Does no I/O.
Called on the asyncio loop.
"""

from google.protobuf.message import DecodeError

from baton.errors import InvalidArgumentError
from baton.v1 import kv_pb2

Piece = tuple[kv_pb2.KvPieceHeader, memoryview]
"""Piece of KV, as (header, view of the payload's bytes)."""

_LENGTH_DELIMITED = 2
_HEADER_TAG = kv_pb2.KvPiece.HEADER_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_PAYLOAD_TAG = kv_pb2.KvPiece.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_MAX_VARINT_BYTES = 5
"""Maximum number of bytes of a varint that is decoded. 5 bytes suffice for lengths below 2**35, which is far above
gRPC's limit for messages."""


def encode_piece(header: kv_pb2.KvPieceHeader, *payload: memoryview) -> bytes:
    """Encode a KvPiece message. `payload` is given in one or more contiguous parts. Each part is copied once, and no
    view of it is kept."""
    head, num_bytes = header.SerializeToString(), sum(part.nbytes for part in payload)
    parts: list[bytes | memoryview] = [bytes((_HEADER_TAG,)), _varint(len(head)), head]
    if num_bytes:  # proto3 leaves an empty field out
        parts += [bytes((_PAYLOAD_TAG,)), _varint(num_bytes), *payload]
    return b"".join(parts)


def decode_piece(data: bytes) -> Piece:
    """Decode a KvPiece message. Return its header and its payload. Raises InvalidArgumentError if `data` is not a
    KvPiece.

    The payload is a view of `data` if the fields have the order that `encode_piece` writes. Otherwise it is a copy.
    """
    try:
        return _split(data) or _parse(data)
    except DecodeError as error:
        raise InvalidArgumentError(f"a message of {len(data)} bytes is not a KvPiece: {error}") from error


def _split(data: bytes) -> Piece | None:
    """Return the piece without a copy of the payload if `data` is a header followed by the payload; else None."""
    head = _field(data, 0, _HEADER_TAG)
    if head is None:
        return None
    start, end = head
    header = kv_pb2.KvPieceHeader.FromString(data[start:end])
    if end == len(data):
        return header, memoryview(b"")
    payload = _field(data, end, _PAYLOAD_TAG)
    if payload is None or payload[1] != len(data):
        return None
    return header, memoryview(data)[payload[0] :]


def _parse(data: bytes) -> Piece:
    piece = kv_pb2.KvPiece.FromString(data)
    return piece.header, memoryview(piece.payload)


def _field(data: bytes, position: int, tag: int) -> tuple[int, int] | None:
    """Return the start and end of the length-delimited field `tag` at `position`; None if another field is at that
    position."""
    if position >= len(data) or data[position] != tag:
        return None
    length = 0
    for index, byte in enumerate(data[position + 1 : position + 1 + _MAX_VARINT_BYTES]):
        length |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            start = position + 2 + index
            return (start, start + length) if start + length <= len(data) else None
    return None


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
