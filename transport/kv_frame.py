"""Message KvPiece without needless copies: one join on the way out, none on the way in.

The payload is KvPiece's last field, so a frame is a short prefix followed by the payload's bytes. Frames are plain
protobuf: any other client may send KvPiece as its own library writes it. Pure; used on the loop as Push's serializer
and deserializer (steps 6 and 7 of a request's way, DESIGN.md, section 4).
"""

from google.protobuf.message import DecodeError

from baton.errors import InvalidArgumentError
from baton.v1 import kv_pb2

Piece = tuple[kv_pb2.KvPieceHeader, memoryview]
"""A piece's header and its payload's bytes."""

_LENGTH_DELIMITED = 2
_HEADER_TAG = kv_pb2.KvPiece.HEADER_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_PAYLOAD_TAG = kv_pb2.KvPiece.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_MAX_VARINT_BYTES = 5
"""Of lengths below 2**35; gRPC's message limit is far below that."""


def encode_piece(header: kv_pb2.KvPieceHeader, payload: memoryview) -> bytes:
    """The bytes of KvPiece(header, payload): copies the payload (contiguous) once, and keeps no view of it."""
    head = header.SerializeToString()
    parts: list[bytes | memoryview] = [bytes((_HEADER_TAG,)), _varint(len(head)), head]
    if payload.nbytes:  # proto3 leaves an empty field out
        parts += [bytes((_PAYLOAD_TAG,)), _varint(payload.nbytes), payload]
    return b"".join(parts)


def decode_piece(data: bytes) -> Piece:
    """Header and payload of a KvPiece; the payload is a view into `data`, without a copy, unless the fields came in
    an order that `encode_piece` does not write. Raises InvalidArgumentError when `data` is no KvPiece."""
    try:
        return _split(data) or _parse(data)
    except DecodeError as error:
        raise InvalidArgumentError(f"a message of {len(data)} bytes is not a KvPiece: {error}") from error


def _split(data: bytes) -> Piece | None:
    """The piece, if `data` is a header, then a payload that ends with the data, and nothing else."""
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
    """Where the value of the length-delimited field `tag` at `position` starts and ends; None if there is none."""
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
