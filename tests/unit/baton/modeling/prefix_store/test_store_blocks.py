"""Blocks of a store, whole: what is put there is what comes out, and a block that cannot be written leaves nothing."""

from pathlib import Path

import pytest
import torch

from baton.errors import InvalidArgumentError, StalePrefixError
from baton.types import TokenRange
from tests.support.engines.prefixes import blocks_in, file_bytes, store_in
from tests.support.wire.block_nodes import BLOCK, LAYOUT, prompt_kv

KV = prompt_kv(LAYOUT, BLOCK)
PIECES = [(layer, KV.tokens, KV.export(layer, KV.tokens)) for layer in range(LAYOUT.num_layers)]


def test_a_block_comes_out_as_it_was_put_there(folder: Path) -> None:
    blocks = store_in(folder, LAYOUT)
    assert blocks.put_block("a", KV.tokens, PIECES, ()) == (True, [])
    assert torch.equal(blocks.open_block("a", KV.tokens).data, KV.data)
    assert blocks.put_block("a", KV.tokens, PIECES, ()) == (True, [])  # is there already


def test_leading_blocks_end_at_a_gap(folder: Path) -> None:
    blocks = store_in(folder, LAYOUT)
    for name in ("a", "b", "d"):
        blocks.put_block(name, KV.tokens, PIECES, ())
    assert [blocks.num_leading(names) for names in (("a", "b", "c", "d"), ("c", "d"), ("d",), ())] == [2, 0, 1, 0]


def test_without_room_nothing_is_stored_and_nothing_spared_is_evicted(folder: Path) -> None:
    blocks = store_in(folder, LAYOUT, limit_bytes=2 * file_bytes(LAYOUT, BLOCK))
    blocks.put_block("a", KV.tokens, PIECES, ())
    blocks.put_block("b", KV.tokens, PIECES, ())
    assert blocks.put_block("c", KV.tokens, PIECES, ("a", "b")) == (False, [])
    assert blocks_in(folder) == {"a", "b"}
    assert blocks.put_block("c", KV.tokens, PIECES, ("a",)) == (True, ["b"])
    assert blocks_in(folder) == {"a", "c"}


@pytest.mark.parametrize("pieces", [PIECES[:1], [*PIECES[:1], (1, TokenRange(0, BLOCK + 1), PIECES[1][2])]])
def test_a_block_that_is_not_whole_leaves_nothing(
    folder: Path, pieces: list[tuple[int, TokenRange, memoryview]]
) -> None:
    blocks = store_in(folder, LAYOUT)
    with pytest.raises(AssertionError):
        blocks.put_block("a", KV.tokens, pieces, ())
    assert blocks_in(folder) == set()


def test_a_block_that_is_not_there_or_has_a_bad_name_is_refused(folder: Path) -> None:
    blocks = store_in(folder, LAYOUT)
    with pytest.raises(StalePrefixError, match="block a is not in"):
        blocks.open_block("a", KV.tokens)
    for refuse in (
        lambda: blocks.num_leading(("../a",)),
        lambda: blocks.open_block("../a", KV.tokens),
        lambda: blocks.put_block("../a", KV.tokens, PIECES, ()),
    ):
        with pytest.raises(InvalidArgumentError, match="is not valid"):
            refuse()
