"""A finished prefill keeps the KV that it computed; an unfinished one keeps nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.store import Filled, PrefixStore
from baton.types import KvLayout, TokenRange
from prefill_workers.prefix_filling import PrefixFilling
from tests.support.engines.prefixes import PLENTY, blocks_in, file_bytes, keep, on_disk, store_in
from tests.support.manual_clock import ManualClock

LAYOUT = KvLayout("model", 2, 1, 4, "float32")
START, BLOCK = 4, 4
NAMES = ("a", "b", "c")
"""Blocks of the tokens [4, 16) of a prompt of 18."""
PROMPT = TokenRange(START, 18)


@pytest.fixture
def store(folder: Path) -> PrefixStore:
    return store_in(folder, LAYOUT)


@pytest.fixture
def kv() -> KvBuffer:
    buffer = KvBuffer(LAYOUT, PROMPT)
    buffer.data.copy_(torch.randn(buffer.data.shape, generator=torch.Generator().manual_seed(1)))
    return buffer


def filling(store: PrefixStore, names: Sequence[str] = NAMES) -> PrefixFilling:
    return PrefixFilling(store, names, START, BLOCK)


def compute(filled: PrefixFilling, kv: KvBuffer, own_start: int) -> None:
    """Compute as a last rank whose chunk begins there."""
    for layer in range(LAYOUT.num_layers):
        own, earlier = TokenRange(own_start, PROMPT.end), TokenRange(PROMPT.start, own_start)
        filled.hold(layer, own, kv.export(layer, own))
        if len(earlier):
            passing = bytearray(kv.export(layer, earlier))
            filled.write(layer, earlier, memoryview(passing))
            passing[:] = bytes(len(passing))  # the next layer takes its place


def kept(store: PrefixStore, kv: KvBuffer, names: Sequence[str] = NAMES) -> bool:
    """Return whether the store holds the computed rows, behind one block of others."""
    others = KvBuffer(LAYOUT, TokenRange(0, START))
    others.data.fill_(7.0)
    keep(store, others, ["start"])
    _, *read = store.open(["start", *names], BLOCK)
    return all(
        torch.equal(block.data, kv.data[:, block.tokens.start - START : block.tokens.end - START]) for block in read
    )


@pytest.mark.parametrize("own_start", [4, 5, 8, 9, 15, 16, 17])
def test_blocks_are_what_all_ranks_computed(store: PrefixStore, kv: KvBuffer, own_start: int) -> None:
    filled = filling(store)
    if own_start > PROMPT.start:
        filled.take()
    compute(filled, kv, own_start)
    assert filled.finish() == Filled(NAMES)
    assert kept(store, kv)


def test_nothing_can_be_read_before_the_end(store: PrefixStore, folder: Path, kv: KvBuffer) -> None:
    filled = filling(store)
    filled.take()
    compute(filled, kv, 9)
    assert all(name.startswith(".unsealed-") for name in blocks_in(folder))
    filled.drop()
    assert blocks_in(folder) == set()
    assert filled.finish() == Filled()


def test_room_that_comes_after_the_job_was_given_up_is_given_back(store: PrefixStore, folder: Path) -> None:
    filled = filling(store)
    filled.drop()
    filled.take()
    assert blocks_in(folder) == set()


def test_what_is_there_already_is_told_and_left_alone(store: PrefixStore, kv: KvBuffer) -> None:
    first = filling(store, NAMES[:2])
    compute(first, kv, START)
    assert first.finish() == Filled(NAMES[:2])
    second = filling(store)
    compute(second, kv, START)
    assert second.finish() == Filled(NAMES)
    assert kept(store, kv)


def test_as_much_as_there_is_room_for_is_kept_from_the_start(folder: Path, kv: KvBuffer) -> None:
    store = store_in(folder, LAYOUT, limit_bytes=2 * file_bytes(LAYOUT, BLOCK))
    filled = filling(store)
    filled.take()
    compute(filled, kv, 9)
    assert filled.finish() == Filled(NAMES[:2])
    assert blocks_in(folder) == set(NAMES[:2])


def test_evicted_blocks_are_reported(folder: Path, kv: KvBuffer) -> None:
    store = store_in(folder, LAYOUT, limit_bytes=3 * file_bytes(LAYOUT, BLOCK))
    keep(store, KvBuffer(LAYOUT, TokenRange(0, 8)), ["old-0", "old-1"])
    filled = filling(store)
    compute(filled, kv, START)
    assert filled.finish() == Filled(NAMES, ("old-1", "old-0"))


def test_without_its_folder_nothing_is_kept_and_nothing_fails(
    store: PrefixStore, folder: Path, kv: KvBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    folder.rmdir()
    filled = filling(store)
    filled.take()
    compute(filled, kv, 9)
    folder.mkdir()  # too late: earlier rows have passed
    assert filled.finish() == Filled()
    assert blocks_in(folder) == set()
    assert "nothing is kept of a prompt" in caplog.text


def test_a_disk_that_fails_takes_nothing_from_what_is_in_memory(
    folder: Path, tmp_path: Path, kv: KvBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    below = store_in(disk, LAYOUT)
    store = PrefixStore(folder, LAYOUT, limit_bytes=PLENTY, clock=ManualClock(1e9), below=on_disk(below))
    disk.rmdir()
    filled = filling(store)
    compute(filled, kv, START)
    assert filled.finish() == Filled(NAMES)
    assert filled.sink(NAMES) == []
    assert "a prompt is not kept on disk" in caplog.text
    assert kept(store, kv)


def test_a_file_system_that_fails_fails_no_job(
    store: PrefixStore, folder: Path, kv: KvBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / NAMES[0]).mkdir()  # in the place of a block, where no file can be made or removed
    filled = filling(store)
    filled.take()
    compute(filled, kv, 9)
    assert filled.finish() == Filled()
    assert "nothing is kept of a prompt" in caplog.text
