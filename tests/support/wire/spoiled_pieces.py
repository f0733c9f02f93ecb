"""Pieces that a receiver must refuse: a valid piece, modifications that make it invalid, and the error that the sender
receives for each."""

from collections.abc import Callable

import pytest

from baton.errors import (
    ByteCountError,
    ChecksumError,
    InvalidArgumentError,
    LayoutMismatchError,
    RangeError,
    StaleStampError,
)
from baton.limits import MAX_MESSAGE_BYTES
from baton.v1 import common_pb2, kv_pb2
from tests.support.wire.kv_loopback import NUM_TOKENS

Spoil = Callable[[kv_pb2.KvPiece], None]


def spoil(change: Callable[[kv_pb2.KvPiece], object]) -> Spoil:
    def spoiled(piece: kv_pb2.KvPiece) -> None:
        change(piece)

    return spoiled


def flip_a_byte(piece: kv_pb2.KvPiece) -> None:
    piece.payload = piece.payload[:9] + bytes((piece.payload[9] ^ 1,)) + piece.payload[10:]


def set_tokens(start: int, end: int) -> Spoil:
    return spoil(lambda piece: piece.header.tokens.CopyFrom(common_pb2.TokenRange(start=start, end=end)))


def lengthen(piece: kv_pb2.KvPiece) -> None:
    piece.payload += b"\0"


def shorten(piece: kv_pb2.KvPiece) -> None:
    piece.payload = piece.payload[:-1]


def set_payload(payload: bytes) -> Spoil:
    return spoil(lambda piece: setattr(piece, "payload", payload))


def set_header(name: str, value: object) -> Spoil:
    return spoil(lambda piece: setattr(piece.header, name, value))


def set_lease(name: str, value: int) -> Spoil:
    return spoil(lambda piece: setattr(piece.header.lease, name, value))


REFUSED = [
    pytest.param(set_lease("stamp", 2**64 - 1), StaleStampError, id="stale stamp"),
    pytest.param(set_lease("slot", 2**32 - 1), StaleStampError, id="unknown slot"),
    pytest.param(shorten, ByteCountError, id="payload too short"),
    pytest.param(lengthen, ByteCountError, id="payload too long"),
    pytest.param(set_payload(b""), ByteCountError, id="no payload"),
    pytest.param(set_payload(bytes(MAX_MESSAGE_BYTES // 2)), ByteCountError, id="large payload"),
    pytest.param(flip_a_byte, ChecksumError, id="flipped byte"),
    pytest.param(set_header("checksum", 0), ChecksumError, id="no checksum"),
    pytest.param(set_header("layout_fingerprint", "0123456789abcdef"), LayoutMismatchError, id="wrong fingerprint"),
    pytest.param(set_header("layout_fingerprint", ""), LayoutMismatchError, id="no fingerprint"),
    pytest.param(set_header("layer", 2), RangeError, id="layer out of range"),
    pytest.param(set_header("layer", 2**32 - 1), RangeError, id="giant layer"),
    pytest.param(set_tokens(NUM_TOKENS - 4, NUM_TOKENS + 4), RangeError, id="range beyond the lease"),
    pytest.param(set_tokens(2**32 - 9, 2**32 - 1), RangeError, id="range far beyond the lease"),
    pytest.param(set_tokens(8, 0), InvalidArgumentError, id="reversed range"),
    pytest.param(set_tokens(0, 2**32 - 1), ByteCountError, id="giant range"),
    pytest.param(spoil(lambda piece: piece.header.ClearField("tokens")), ByteCountError, id="no range"),
    pytest.param(spoil(lambda piece: piece.header.ClearField("lease")), InvalidArgumentError, id="no lease"),
    pytest.param(spoil(lambda piece: piece.ClearField("header")), InvalidArgumentError, id="no header"),
]
