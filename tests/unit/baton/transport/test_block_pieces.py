"""Blocks as pieces on the wire: what is cut is put together again, and nothing else is taken."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.errors import BatonError, ByteCountError, ChecksumError, LayoutMismatchError, RangeError
from baton.modeling.kv.buffers import KvBuffer
from baton.transport.block_pieces import BlockAssembly, BlockRun, frames_of
from baton.transport.kv_frame import Piece, decode_piece
from baton.types import KvLayout, TokenRange
from tests.support.wire.block_nodes import LAYOUT, prompt_kv

WIDE = KvLayout("weights", num_layers=2, num_kv_heads=3, head_dim=64, dtype="float32")
"""1.5 KiB a token and layer: 682 tokens a piece."""
DEEP = replace(WIDE, num_layers=12)
"""Five layers of 128 tokens a piece."""


def sent(kv: KvBuffer) -> list[Piece]:
    """A block's pieces, over the wire and back."""
    return [decode_piece(frame) for frame in frames_of(kv, kv.layout, kv.tokens)]


@pytest.mark.parametrize(
    ("layout", "num_tokens", "num_pieces"), [(LAYOUT, 4, 1), (DEEP, 128, 3), (WIDE, 682, 2), (WIDE, 1400, 6)]
)
def test_a_block_comes_as_it_was(layout: KvLayout, num_tokens: int, num_pieces: int) -> None:
    kv, copy = prompt_kv(layout, num_tokens), prompt_kv(layout, num_tokens, seed=1)
    block = BlockAssembly("a", kv.tokens, layout)
    pieces = sent(kv)
    assert len(pieces) == num_pieces
    for number, piece in enumerate(pieces):
        assert not block.is_complete, f"complete after {number} pieces"
        block.add(*piece)
    assert block.is_complete
    for layer, tokens, data in block.pieces:
        copy.write(layer, tokens, data)
    assert torch.equal(copy.data, kv.data)


def test_a_block_lies_where_it_does_in_its_prompt() -> None:
    run = BlockRun(("c", "d"), 4, first_token=8)
    assert list(run.parts()) == [("c", TokenRange(8, 12)), ("d", TokenRange(12, 16))]


def damaged(piece: Piece) -> Piece:
    header, payload = piece
    return header, memoryview(bytes([payload[0] ^ 1]) + bytes(payload[1:]))


def of_a_layer_too_many(piece: Piece) -> Piece:
    return piece[0], memoryview(bytes(piece[1]) + bytes(128 * DEEP.row_bytes * (DEEP.num_layers - 2)))


def cut(piece: Piece) -> Piece:
    return piece[0], piece[1][:-1]


def foreign(piece: Piece) -> Piece:
    piece[0].layout_fingerprint = "another"
    return piece


def shifted(piece: Piece) -> Piece:
    piece[0].tokens.start += 4
    piece[0].tokens.end += 4
    return piece


def too_long(piece: Piece) -> Piece:
    piece[0].tokens.end += 1
    return piece


def empty(piece: Piece) -> Piece:
    piece[0].tokens.end = piece[0].tokens.start
    return piece


def of_another_layer(piece: Piece) -> Piece:
    piece[0].layer += 1
    return piece


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (damaged, ChecksumError),
        (cut, ByteCountError),
        (of_a_layer_too_many, ByteCountError),
        (foreign, LayoutMismatchError),
        (shifted, RangeError),
        (too_long, RangeError),
        (empty, RangeError),
        (of_another_layer, RangeError),
    ],
    ids=lambda each: str(each.__name__),
)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_no_other_piece_is_taken(spoil: Callable[[Piece], Piece], error: type[BatonError], number: int) -> None:
    kv = prompt_kv(DEEP, 128)
    block, pieces = BlockAssembly("a", kv.tokens, DEEP), sent(kv)
    for piece in pieces[:number]:
        block.add(*piece)
    with pytest.raises(error, match="block a, layer"):
        block.add(*spoil(pieces[number]))
    assert len(block.pieces) == 5 * number
