"""Blocks are written once, read in place by all ranks, evicted when nobody reads them, and refused when spoiled."""

import os
import random
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from baton.errors import ConfigError, InvalidArgumentError, StalePrefixError
from baton.modeling.prefix_store.holdings import Holdings
from baton.modeling.prefix_store.store import PrefixStore
from baton.process.clock import SystemClock
from baton.types import KvLayout, TokenRange
from tests.support.engines.chains import ChainGroup, assert_right, cached_prefix, random_chunks, random_tokens
from tests.support.engines.prefixes import (
    PLENTY,
    blocks_in,
    file_bytes,
    fill,
    keep,
    mapped,
    prefix_folder,
    random_kv,
    same,
    store_in,
)
from tests.support.manual_clock import ManualClock
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

LAYOUT = KvLayout("model", 3, 2, 4, "float32")
BLOCK = 5
SIZE = file_bytes(LAYOUT, BLOCK)


@pytest.fixture
def store(folder: Path) -> PrefixStore:
    return store_in(folder, LAYOUT)


def test_what_was_sealed_is_read(store: PrefixStore) -> None:
    kv = random_kv(LAYOUT, 15)
    assert not keep(store, kv, ["a", "b", "c"]).evicted
    read = store.open(["a", "b", "c"], BLOCK)
    assert [each.tokens for each in read] == [TokenRange(0, 5), TokenRange(5, 10), TokenRange(10, 15)]
    assert same(read, kv)
    assert bytes(read[1].export(2, TokenRange(6, 9))) == bytes(kv.export(2, TokenRange(6, 9)))


@pytest.mark.parametrize(("there", "num_found"), [("abc", 3), ("ab", 2), ("ac", 1), ("bc", 0), ("", 0)])
def test_as_many_leading_blocks_are_opened_as_are_there(
    store: PrefixStore, folder: Path, there: str, num_found: int
) -> None:
    kv = random_kv(LAYOUT, 15)
    keep(store, kv, ["a", "b", "c"])
    for name in set("abc") - set(there):
        (folder / name).unlink()
    found = store.open_leading(["a", "b", "c"], BLOCK).blocks
    assert len(found) == num_found
    assert not found or same(found, kv)
    assert len(mapped(folder)) == num_found


def test_bfloat16(folder: Path) -> None:
    layout = replace(LAYOUT, dtype="bfloat16")
    store, kv = store_in(folder, layout), random_kv(layout, 5)
    keep(store, kv)
    assert same(store.open(["p"], BLOCK), kv)


def test_readers_share_the_file_s_pages_and_cannot_spoil_it(store: PrefixStore, folder: Path) -> None:
    kv = random_kv(LAYOUT, 5)
    keep(store, kv)
    first, second = store.open(["p"], BLOCK), store.open(["p"], BLOCK)
    assert len(mapped(folder)) == 2
    first[0].data.fill_(0.0)
    assert same(second, kv)
    assert same(store.open(["p"], BLOCK), kv)


def test_mapping_lives_as_long_as_its_last_view(store: PrefixStore, folder: Path) -> None:
    keep(store, random_kv(LAYOUT, 5))
    read = store.open(["p"], BLOCK)
    rows = read[0].rows(1, TokenRange(0, 2))
    del read
    assert len(mapped(folder)) == 1
    del rows
    assert mapped(folder) == []


def test_unsealed_block_is_not_there_and_takes_room(store: PrefixStore, folder: Path) -> None:
    room = store.take(["p"], TokenRange(0, 5), BLOCK)
    with pytest.raises(StalePrefixError):
        store.open(["p"], BLOCK)
    assert store.holdings() == Holdings(1, SIZE, PLENTY)
    room.drop()
    room.drop()
    assert blocks_in(folder) == set()
    assert store.holdings() == Holdings(0, 0, PLENTY)


def test_seal_asks_for_every_row(store: PrefixStore) -> None:
    room = store.take(["p"], TokenRange(0, 5), BLOCK)
    (writer,) = room.writers
    writer.write(1, TokenRange(0, 5), random_kv(LAYOUT, 5).export(1, TokenRange(0, 5)))
    with pytest.raises(AssertionError, match="10 rows of block p"):
        room.seal()
    assert writer.name == "p"
    room.drop()


def test_first_of_two_that_seal_one_name_stays(store: PrefixStore, folder: Path) -> None:
    first = random_kv(LAYOUT, 5, seed=1)
    late = store.take(["p"], TokenRange(0, 5), BLOCK)
    keep(store, first)
    fill(late, random_kv(LAYOUT, 5, seed=2))
    assert blocks_in(folder) == {"p"}
    assert same(store.open(["p"], BLOCK), first)


def test_what_is_there_is_not_written_again(store: PrefixStore) -> None:
    keep(store, random_kv(LAYOUT, 5))
    room = store.take(["p", "q"], TokenRange(0, 10), BLOCK)
    assert (room.present, [writer.name for writer in room.writers]) == (["p"], ["q"])
    room.drop()


@pytest.mark.parametrize("name", ["", ".", "..", "../p", "a/b", "/p", ".p", "p\n", "p\0", "x" * 129])
def test_names_stay_in_the_folder(store: PrefixStore, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not valid"):
        store.open([name], BLOCK)
    with pytest.raises(InvalidArgumentError, match="is not valid"):
        store.take([name], TokenRange(0, 5), BLOCK)


def test_link_out_of_the_folder_is_not_followed(store: PrefixStore, folder: Path) -> None:
    keep(store, random_kv(LAYOUT, 5), ["q"])
    (folder / "p").symlink_to(folder / "q")
    with pytest.raises(StalePrefixError):
        store.open(["p"], BLOCK)


# Blocks that are not what their names say.


def spoil(folder: Path, change: str) -> None:
    path = folder / "p"
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    if change == "cut":
        del content[-1:]
    elif change == "cut to a part of its header":
        del content[20:]
    elif change == "longer":
        content += b"\0"
    elif change == "magic":
        content[0] ^= 1
    elif change == "tokens":
        content[32:40] = struct.pack("<q", -5)
    elif change == "bytes":
        content[40:48] = struct.pack("<q", 2**62)
    elif change == "another block":
        content[48:49] = b"q"
    else:
        content.clear()
    path.write_bytes(content)


CHANGES = ("cut", "longer", "tokens", "bytes", "cut to a part of its header", "magic", "another block", "empty")


@pytest.mark.parametrize("change", CHANGES)
def test_spoiled_block_is_refused_and_removed(store: PrefixStore, folder: Path, change: str) -> None:
    keep(store, random_kv(LAYOUT, 5))
    spoil(folder, change)
    with pytest.raises(StalePrefixError, match="prefill without it"):
        store.open(["p"], BLOCK)
    keep(store, random_kv(LAYOUT, 5, seed=3))
    assert same(store.open(["p"], BLOCK), random_kv(LAYOUT, 5, seed=3))


def test_block_of_another_model_or_size_is_refused(store: PrefixStore, folder: Path) -> None:
    keep(store, random_kv(LAYOUT, 5))
    with pytest.raises(StalePrefixError, match="is not of 4 tokens"):
        store.open(["p"], 4)
    keep(store, random_kv(LAYOUT, 5))
    other = store_in(folder, replace(LAYOUT, model_fingerprint="other"))
    with pytest.raises(StalePrefixError, match="prefill without it"):
        other.open(["p"], BLOCK)


# Room, and what has to go for it.


def bounded(folder: Path, num_blocks: int, clock: ManualClock | None = None) -> PrefixStore:
    """One with room for so many blocks, and a byte less than one more."""
    return store_in(folder, LAYOUT, limit_bytes=(num_blocks + 1) * SIZE - 1, clock=clock)


def test_what_was_used_longest_ago_goes_first(folder: Path) -> None:
    clock = ManualClock(1e9)
    store = bounded(folder, 3, clock)
    for name in ("a", "b", "c"):
        keep(store, random_kv(LAYOUT, 5), [name])
        clock.advance(1)
    store.open(["a"], BLOCK)
    clock.advance(1)
    assert keep(store, random_kv(LAYOUT, 5), ["d"]).evicted == ["b"]
    assert blocks_in(folder) == {"a", "c", "d"}


def test_a_prompt_s_later_blocks_go_before_its_earlier_ones(folder: Path) -> None:
    clock = ManualClock(1e9)
    store = bounded(folder, 4, clock)
    keep(store, random_kv(LAYOUT, 20), ["a", "b", "c", "d"])
    clock.advance(1)
    assert keep(store, random_kv(LAYOUT, 5), ["x"]).evicted == ["d"]
    clock.advance(1)
    store.open(["a", "b", "c"], BLOCK)
    clock.advance(1)
    assert store.names() == ["x", "c", "b", "a"]
    assert keep(store, random_kv(LAYOUT, 15), ["u", "v", "w"]).evicted == ["x", "c", "b"]


def test_what_is_read_is_not_evicted(folder: Path) -> None:
    store, kv = bounded(folder, 2), random_kv(LAYOUT, 10)
    keep(store, kv, ["a", "b"])
    read = store.open(["a", "b"], BLOCK)
    room = store.take(["c"], TokenRange(0, 5), BLOCK)
    assert (room.writers, room.evicted) == ([], [])
    assert same(read, kv)
    del read
    assert keep(store, random_kv(LAYOUT, 5), ["c"]).evicted == ["b"]
    assert store.holdings().num_bytes <= store.limit_bytes


def test_a_prompt_does_not_evict_its_own_blocks_and_keeps_its_first_ones(folder: Path) -> None:
    store, kv = bounded(folder, 2), random_kv(LAYOUT, 20)
    keep(store, kv, ["a", "b", "c", "d"])
    assert blocks_in(folder) == {"a", "b"}
    room = keep(store, kv, ["a", "b", "c", "d"])
    assert (room.present, room.writers, room.evicted) == (["a", "b"], [], [])


def test_no_room_at_all_keeps_nothing(folder: Path) -> None:
    assert keep(store_in(folder, LAYOUT, limit_bytes=SIZE - 1), random_kv(LAYOUT, 5)).writers == []


def test_more_than_the_file_system_has_keeps_nothing(folder: Path) -> None:
    free = os.statvfs(folder)
    num_tokens = free.f_bavail * free.f_frsize // LAYOUT.token_bytes + 1
    room = store_in(folder, LAYOUT, limit_bytes=1 << 60).take(["p"], TokenRange(0, num_tokens), num_tokens)
    assert room.writers == []
    assert blocks_in(folder) == set()


def test_what_a_killed_writer_left_is_nobody_s_and_goes(folder: Path) -> None:
    """The writer is another process, killed when it has taken all the room."""
    program = f"""
import os, signal, sys
from pathlib import Path
from baton.types import KvLayout, TokenRange
from baton.modeling.prefix_store.store import PrefixStore
from tests.support.manual_clock import ManualClock
store = PrefixStore(Path({str(folder)!r}), {LAYOUT!r}, limit_bytes={3 * SIZE}, clock=ManualClock(1e9))
room = store.take(["a", "b", "c"], TokenRange(0, 15), 5)
assert len(room.writers) == 3
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -9
    store = store_in(folder, LAYOUT, limit_bytes=3 * SIZE)
    assert store.holdings().num_blocks == 3
    with pytest.raises(StalePrefixError):
        store.open(["a"], BLOCK)
    keep(store, random_kv(LAYOUT, 15), ["x", "y", "z"])
    assert blocks_in(folder) == {"x", "y", "z"}


def test_churn_never_exceeds_the_bound_and_reads_what_was_written(folder: Path) -> None:
    """Writers and readers of one folder at once; what a block holds follows from its name."""
    stop, store = threading.Event(), store_in(folder, LAYOUT, limit_bytes=10 * SIZE, clock=SystemClock())
    most: list[int] = []

    def watch() -> None:
        while not stop.wait(0.0005):
            with store.locked():
                most.append(store.holdings().num_bytes)

    def work(seed: int) -> int:
        rng, num_read = random.Random(seed), 0
        own = store_in(folder, LAYOUT, limit_bytes=10 * SIZE, clock=SystemClock())
        for _ in range(150):
            prompt = rng.randrange(6)
            names = [f"{prompt}-{index}" for index in range(rng.randint(1, 4))]
            kv = random_kv(LAYOUT, 5 * len(names), seed=prompt)
            kv.data.fill_(prompt)
            keep(own, kv, names)
            try:
                read = own.open(names[: rng.randint(1, len(names))], BLOCK)
            except StalePrefixError:
                continue
            num_read += 1
            assert all(bool((block.data == prompt).all()) for block in read)
        return num_read

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            num_read = sum(pool.map(work, range(4)))
    finally:
        stop.set()
        watcher.join()
    assert num_read > 50
    assert 0 < max(most) <= 10 * SIZE


def test_stores_of_one_folder_are_one_and_of_the_next_another(folder: Path) -> None:
    first = store_in(folder, LAYOUT).identity
    assert store_in(folder, LAYOUT).identity == first
    with prefix_folder() as other:
        assert store_in(other, LAYOUT).identity != first


def test_store_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder: make one in /dev/shm"):
        store_in(tmp_path / "nowhere", LAYOUT)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_chains_that_begin_behind_shared_blocks_equal_one_process(folder: Path, num_ranks: int) -> None:
    decoder = random_decoder(num_layers=3)
    store, rng = store_in(folder, decoder.layout), random.Random(num_ranks)
    ids = random_tokens(rng, 60, decoder)
    names = [f"block-{index}" for index in range(10)]
    keep(store, cached_prefix(decoder, ids, 50), names)
    with ChainGroup(decoder, num_ranks) as group:
        for num_blocks in (1, 2, 7, 10):
            start = rng.randint(num_blocks * 5 - 4, num_blocks * 5)  # of the last block a request may use less
            chunks = random_chunks(rng, TokenRange(start, 60), num_ranks)
            sent = group.payload_bytes()
            run = group.submit(group.prepare(ids, chunks, prefix=partial(store.open, names[:num_blocks], 5)))
            assert_right(group, run)
            relayed = sum(chunk.end - start for chunk in chunks[:-1])
            assert group.payload_bytes() - sent == relayed * decoder.layout.token_bytes
            del run
    assert mapped(folder) == []
