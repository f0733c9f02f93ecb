"""Encodes and decodes the message KvPiece with one copy of the payload when sending, and none when receiving.

The payload is KvPiece's last field, so a frame is a short prefix followed by the payload's bytes. Frames are plain
protobuf: any other client may send a KvPiece as its own library writes it. Used as the serializer of Push by
`baton.transport.kv_sender` and as its deserializer by `baton.transport.kv_receiver`. Pure; called on the loop.
"""

from google.protobuf.message import DecodeError

from baton.errors import InvalidArgumentError
from baton.v1 import kv_pb2

Piece = tuple[kv_pb2.KvPieceHeader, memoryview]
"""A piece's header, and a view of its payload's bytes."""

_LENGTH_DELIMITED = 2
_HEADER_TAG = kv_pb2.KvPiece.HEADER_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_PAYLOAD_TAG = kv_pb2.KvPiece.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_MAX_VARINT_BYTES = 5
"""Longest varint read here: enough for lengths below 2**35. gRPC's message limit is far below that."""


def encode_piece(header: kv_pb2.KvPieceHeader, *payload: memoryview) -> bytes:
    """Return the bytes of KvPiece(header, payload). `payload` is one or more contiguous parts, each copied once. No
    view of them is kept."""
    head, num_bytes = header.SerializeToString(), sum(part.nbytes for part in payload)
    parts: list[bytes | memoryview] = [bytes((_HEADER_TAG,)), _varint(len(head)), head]
    if num_bytes:  # proto3 leaves an empty field out
        parts += [bytes((_PAYLOAD_TAG,)), _varint(num_bytes), *payload]
    return b"".join(parts)


def decode_piece(data: bytes) -> Piece:
    """Return the header and the payload of a KvPiece. Raises InvalidArgumentError when `data` is not a KvPiece.

    The payload is a view into `data`, without a copy, if the fields have the order that `encode_piece` writes;
    otherwise it is a copy.
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
