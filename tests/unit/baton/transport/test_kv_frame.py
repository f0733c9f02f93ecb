import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError
from baton.transport.kv_frame import decode_piece, encode_piece
from baton.v1 import common_pb2, kv_pb2

headers = st.builds(
    kv_pb2.KvPieceHeader,
    lease=st.none() | st.builds(common_pb2.LeaseRef, slot=st.integers(0, 2**32 - 1), stamp=st.integers(0, 2**64 - 1)),
    layout_fingerprint=st.text(max_size=200),
    layer=st.integers(0, 2**32 - 1),
    tokens=st.none() | st.builds(common_pb2.TokenRange, start=st.integers(0, 2**32 - 1), end=st.integers(0, 2**32 - 1)),
    checksum=st.integers(0, 2**64 - 1),
)
payloads = st.binary(max_size=300) | st.integers(0, 70_000).map(bytes)


@settings(deadline=None)
@given(headers, payloads)
def test_encodes_as_protobuf_does(header: kv_pb2.KvPieceHeader, payload: bytes) -> None:
    expected = kv_pb2.KvPiece(header=header, payload=payload).SerializeToString()
    assert encode_piece(header, memoryview(payload)) == expected


@settings(deadline=None)
@given(headers, payloads)
def test_decodes_as_protobuf_does(header: kv_pb2.KvPieceHeader, payload: bytes) -> None:
    data = kv_pb2.KvPiece(header=header, payload=payload).SerializeToString()
    decoded, view = decode_piece(data)
    assert (decoded, bytes(view)) == (header, payload)


@settings(deadline=None)
@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: b"\x0a\x02\x18\x05\x12" + tail))
def test_any_bytes_decode_as_protobuf_decodes_them_or_are_refused(data: bytes) -> None:
    try:
        expected = kv_pb2.KvPiece.FromString(data)
    except DecodeError:
        with pytest.raises(InvalidArgumentError):
            decode_piece(data)
        return
    header, view = decode_piece(data)
    assert (header, bytes(view)) == (expected.header, expected.payload)


def test_decoded_payload_is_a_view_into_the_message() -> None:
    data = encode_piece(kv_pb2.KvPieceHeader(layer=3), memoryview(bytes(1000)))
    assert decode_piece(data)[1].obj is data


def test_encoded_piece_keeps_no_view_of_the_payload() -> None:
    memory = bytearray(1000)
    data = encode_piece(kv_pb2.KvPieceHeader(layer=3), memoryview(memory))
    memory[:] = b"\xff" * 1000
    memory.extend(b"more")  # a BufferError if a view were left
    assert bytes(decode_piece(data)[1]) == bytes(1000)


def test_payload_of_wider_elements_is_sent_as_bytes() -> None:
    words = memoryview(bytes(range(16))).cast("I")
    assert bytes(decode_piece(encode_piece(kv_pb2.KvPieceHeader(layer=1), words))[1]) == bytes(range(16))


LAYER_3 = kv_pb2.KvPieceHeader(layer=3)


@pytest.mark.parametrize(
    ("data", "header", "payload"),
    [
        pytest.param(b"\x12\x03abc\x0a\x02\x18\x03", LAYER_3, b"abc", id="payload before header"),
        pytest.param(b"\x0a\x02\x18\x03\x12\x03abc\x18\x01", LAYER_3, b"abc", id="unknown field after the payload"),
        pytest.param(b"", kv_pb2.KvPieceHeader(), b"", id="empty message"),
    ],
)
def test_unusual_pieces_are_read(data: bytes, header: kv_pb2.KvPieceHeader, payload: bytes) -> None:
    decoded, view = decode_piece(data)
    assert (decoded, bytes(view)) == (header, payload)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a\x05\x18", id="header cut off"),
        pytest.param(b"\x0a\x02\x18\x05\x12\x04abc", id="payload cut off"),
        pytest.param(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="endless length"),
        pytest.param(b"\x0a\x02\xff\xff\x12\x01a", id="header is no message"),
        pytest.param(b"\xff", id="no field"),
    ],
)
def test_what_is_no_piece_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a KvPiece"):
        decode_piece(data)
