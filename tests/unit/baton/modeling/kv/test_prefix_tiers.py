"""A prefix store with another one below it, on disk: what is evicted comes back, and each keeps its bound."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from baton.errors import StalePrefixError
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.holdings import COUNTED_S, Holdings
from baton.modeling.prefix_store.store import PrefixStore
from baton.types import TokenRange
from tests.support.engines.chains import until
from tests.support.engines.prefixes import blocks_in, file_bytes, keep, mapped, on_disk, random_kv, same, store_in
from tests.support.manual_clock import ManualClock
from tests.support.models.tiny_models import random_decoder

LAYOUT = random_decoder().layout
BLOCK = 5
SIZE = file_bytes(LAYOUT, BLOCK)


@pytest.fixture
def tiers(folder: Path, tmp_path: Path) -> PrefixStore:
    """Room for two blocks, and below for four."""
    below = store_in(tmp_path, LAYOUT, limit_bytes=4 * SIZE)
    return PrefixStore(folder, LAYOUT, limit_bytes=2 * SIZE, clock=ManualClock(1e9), below=on_disk(below))


def sunk(tiers: PrefixStore, names: Sequence[str], seed: int = 0) -> tuple[KvBuffer, list[str]]:
    kv = random_kv(LAYOUT, BLOCK * len(names), seed)
    room = keep(tiers, kv, names)
    assert room.filled(names).stored == tuple(names)
    return kv, tiers.sink(names, TokenRange(0, BLOCK * len(names)), BLOCK)


def test_what_is_evicted_from_memory_comes_back_from_disk(tiers: PrefixStore, folder: Path, tmp_path: Path) -> None:
    first, gone = sunk(tiers, ["a", "b"])
    second, gone_then = sunk(tiers, ["c", "d"], seed=1)
    assert (gone, gone_then) == ([], [])
    assert (blocks_in(folder), blocks_in(tmp_path)) == ({"c", "d"}, set("abcd"))
    assert same(tiers.open(["a", "b"], BLOCK), first)
    in_memory, on_disk = (tiers.open_leading([*names, "e"], BLOCK) for names in ("cd", "ab"))
    assert same(in_memory.blocks, second)
    assert same(on_disk.blocks, first)
    assert (in_memory.num_disk_bytes, on_disk.num_disk_bytes) == (0, first.num_bytes)
    assert set(tiers.names()) == set("abcd")


def test_the_disk_is_counted_seldom(folder: Path, tmp_path: Path) -> None:
    clock = ManualClock(1e9)
    below = store_in(tmp_path, LAYOUT, limit_bytes=4 * SIZE)
    tiers = PrefixStore(folder, LAYOUT, limit_bytes=2 * SIZE, clock=clock, below=on_disk(below))
    assert tiers.holdings() == Holdings(0, 0, 2 * SIZE, 0, 4 * SIZE)
    sunk(tiers, ["a", "b"])
    assert tiers.holdings() == Holdings(2, 2 * SIZE, 2 * SIZE, 0, 4 * SIZE), "as it was counted before"
    clock.advance(COUNTED_S)
    until(lambda: tiers.holdings() == Holdings(2, 2 * SIZE, 2 * SIZE, 2 * SIZE, 4 * SIZE))


def test_only_what_is_on_no_tier_is_told_as_evicted(tiers: PrefixStore) -> None:
    sunk(tiers, ["a", "b"])
    room = tiers.take(["x", "y"], TokenRange(0, 2 * BLOCK), BLOCK)
    room.drop()
    assert room.evicted == []
    keep(tiers, random_kv(LAYOUT, BLOCK), ["z"])
    room = tiers.take(["v", "w"], TokenRange(0, 2 * BLOCK), BLOCK)
    room.drop()
    assert room.evicted == ["z"]


def test_each_tier_keeps_its_bound(tiers: PrefixStore, folder: Path, tmp_path: Path) -> None:
    assert tiers.below is not None
    for number in range(6):
        _, gone = sunk(tiers, [f"{number}a", f"{number}b"], seed=number)
        assert tiers.holdings().num_bytes <= 2 * SIZE
        assert tiers.below.ask(PrefixStore.holdings, Holdings(0, 2**60, 0)).num_bytes <= 4 * SIZE
        assert len(gone) == (2 if number >= 2 else 0)
        assert not any(tiers.has(name) for name in gone)
    assert (len(blocks_in(folder)), len(blocks_in(tmp_path))) == (2, 4)


@pytest.mark.parametrize(("gone", "num_sunk"), [("a", 0), ("b", 1)])
def test_blocks_sink_up_to_the_first_that_is_gone(
    tiers: PrefixStore, folder: Path, tmp_path: Path, gone: str, num_sunk: int
) -> None:
    kv = random_kv(LAYOUT, 2 * BLOCK)
    keep(tiers, kv, ["a", "b"])
    (folder / gone).unlink()
    assert tiers.sink(["a", "b"], TokenRange(0, 2 * BLOCK), BLOCK) == []
    assert blocks_in(tmp_path) == set("ab"[:num_sunk])
    assert same(tiers.open_leading(["a"], BLOCK).blocks, kv) if num_sunk else not tiers.has("a")


def test_what_was_read_from_disk_needs_it_no_more(tiers: PrefixStore, tmp_path: Path) -> None:
    kv, _ = sunk(tiers, ["a", "b"])
    sunk(tiers, ["c", "d"], seed=1)
    read = tiers.open(["a", "b"], BLOCK)
    for name in "ab":
        (tmp_path / name).chmod(0o600)
        (tmp_path / name).write_bytes(bytes(SIZE))
    assert not mapped(tmp_path)
    assert same(read, kv)


def test_a_file_on_disk_is_not_mapped_while_it_is_written(
    tiers: PrefixStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of it that the disk does not give would stop all threads of the process."""
    found, whole = [], os.pwrite

    def write(*call: Any) -> int:
        found.append(mapped(tmp_path))
        return whole(*call)

    monkeypatch.setattr(os, "pwrite", write)
    sunk(tiers, ["a", "b"])
    assert found == [[], []]


def test_a_disk_that_fails_has_nothing(tiers: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, _ = sunk(tiers, ["a", "b"])
    sunk(tiers, ["c", "d"], seed=1)
    whole, seen = os.preadv, os.stat

    def fails(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(StalePrefixError, match="block a cannot be read"):
        tiers.open(["a", "b"], BLOCK)
    assert tiers.open_leading(["a"], BLOCK).blocks == ()
    monkeypatch.setattr(os, "preadv", whole)
    assert same(tiers.open(["a", "b"], BLOCK), kv)
    monkeypatch.setattr(os, "stat", fails)
    has = tiers.has("a")
    monkeypatch.setattr(os, "stat", seen)
    assert (has, tiers.has("a")) == (False, True)


def test_without_a_store_below_nothing_sinks(folder: Path) -> None:
    store = store_in(folder, LAYOUT)
    keep(store, random_kv(LAYOUT, BLOCK), ["a"])
    assert store.sink(["a"], TokenRange(0, BLOCK), BLOCK) == []
