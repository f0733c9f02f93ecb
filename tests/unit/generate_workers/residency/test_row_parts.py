"""Rows of parts: each layer lies in one of them, each part is opened once, and all count where they lie."""

from dataclasses import replace

import pytest
import torch

from baton.modeling.kv.buffers import byte_view
from baton.modeling.kv.row_memory import PAGE_BYTES, PagedMemory
from baton.types import TokenRange
from generate_workers.residency.port import KvBytes
from generate_workers.residency.row_parts import Area, PagedKv, StoredRow
from tests.support.engines.devices import PoisonedMemory
from tests.support.engines.infinigen import LAYOUT

NUM_FIRST = 2
NUM_TOKENS, CAPACITY = 9, 20
TOKENS = TokenRange(0, NUM_TOKENS)


def kv_of(num_layers: int) -> PagedKv:
    return PagedKv(replace(LAYOUT, num_layers=num_layers), PoisonedMemory, CAPACITY)


def split_row() -> StoredRow:
    """A row whose first layers are on the device as well."""
    first = kv_of(NUM_FIRST)
    return StoredRow([first, kv_of(LAYOUT.num_layers - NUM_FIRST)], [first])


def filled() -> tuple[StoredRow, torch.Tensor]:
    """An open row, and what was written to it, `[L, T, 2, G, H]`."""
    row = split_row()
    row.open(NUM_TOKENS, CAPACITY)
    shape = (LAYOUT.num_layers, NUM_TOKENS, 2, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    kv_LT2GH = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for layer, kv_T2GH in enumerate(kv_LT2GH):
        row.write(layer, TOKENS, byte_view(kv_T2GH)).result()
    return row, kv_LT2GH


def test_every_layer_is_read_where_it_was_written() -> None:
    row, kv_LT2GH = filled()
    some = TokenRange(3, 7)
    for layer, kv_T2GH in enumerate(kv_LT2GH):
        assert torch.equal(row.kv(layer, TOKENS), kv_T2GH)
        assert bytes(row.export(layer, some)) == bytes(byte_view(kv_T2GH[3:7]))


def test_a_part_that_is_home_and_device_counts_as_both() -> None:
    row, _ = filled()
    assert row.num_bytes == row.bytes_for(NUM_TOKENS) == KvBytes(5 * PAGE_BYTES, 2 * PAGE_BYTES)
    row.release()
    assert row.num_bytes == KvBytes()


def test_a_copy_has_the_same_kv_and_an_area_none() -> None:
    row, kv_LT2GH = filled()
    areas = [Area(replace(LAYOUT, num_layers=1), PagedMemory, CAPACITY) for _ in range(2)]
    source, target = (StoredRow([kv_of(LAYOUT.num_layers)], [area]) for area in areas)
    for each in (source, target):
        each.open(NUM_TOKENS, CAPACITY)
    for layer in range(LAYOUT.num_layers):
        source.write(layer, TOKENS, row.export(layer, TOKENS)).result()
    areas[0].commit(TokenRange(NUM_TOKENS - 1, NUM_TOKENS))
    target.copy_from(source, NUM_TOKENS)
    assert [each.num_bytes.device for each in (source, target)] == [PAGE_BYTES, 0]
    assert all(torch.equal(target.kv(layer, TOKENS), kv_T2GH) for layer, kv_T2GH in enumerate(kv_LT2GH))


def test_a_row_that_cannot_be_opened_holds_nothing() -> None:
    class FullMemory(PagedMemory):
        def expect(self, num_tokens: int) -> None:
            raise MemoryError("full")

    first = kv_of(LAYOUT.num_layers)
    row = StoredRow([first], [Area(replace(LAYOUT, num_layers=1), FullMemory, CAPACITY)])
    with pytest.raises(MemoryError, match="full"):
        row.open(NUM_TOKENS, CAPACITY)
    assert row.num_bytes == KvBytes()
    with pytest.raises(AssertionError, match="the slot is not claimed"):
        _ = row.tokens
