"""Cached prefixes are written once, read in place by all ranks, and refused when they are not what they should be."""

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.errors import (
    BatonError,
    ByteCountError,
    ConfigError,
    InvalidArgumentError,
    LayoutMismatchError,
    NotFoundError,
    ResourceExhaustedError,
)
from baton.types import KvLayout, TokenRange
from modeling.kv_buffers import KvBuffer
from prefill_workers.prefix_store import PrefixStore
from tests.support.chains import ChainGroup, assert_right, cached_prefix, random_chunks, random_tokens
from tests.support.prefixes import keep, mapped, prefix_folder
from tests.support.tiny_models import random_decoder

LAYOUT = KvLayout("model", 3, 2, 4, "float32")


@pytest.fixture
def folder() -> Iterator[Path]:
    with prefix_folder() as made:
        yield made


@pytest.fixture
def store(folder: Path) -> PrefixStore:
    return PrefixStore(folder, LAYOUT)


def filled(num_tokens: int, seed: int = 0, layout: KvLayout = LAYOUT) -> KvBuffer:
    buffer = KvBuffer(layout, TokenRange(0, num_tokens))
    buffer.data.copy_(torch.randn(buffer.data.shape, generator=torch.Generator().manual_seed(seed)))
    return buffer


def test_what_was_sealed_is_read(store: PrefixStore) -> None:
    kv = filled(5)
    keep(store, kv)
    read = store.open("p")
    assert read.tokens == TokenRange(0, 5)
    assert torch.equal(read.data, kv.data)
    assert bytes(read.export(2, TokenRange(1, 4))) == bytes(kv.export(2, TokenRange(1, 4)))


def test_bfloat16(folder: Path) -> None:
    layout = replace(LAYOUT, dtype="bfloat16")
    store, kv = PrefixStore(folder, layout), filled(5, layout=layout)
    keep(store, kv)
    assert torch.equal(store.open("p").data, kv.data)


def test_readers_share_the_file_s_pages_and_cannot_spoil_it(store: PrefixStore, folder: Path) -> None:
    kv = filled(5)
    keep(store, kv)
    first, second = store.open("p"), store.open("p")
    assert len(mapped(folder)) == 2
    first.data.fill_(0.0)
    assert torch.equal(second.data, kv.data)
    assert torch.equal(store.open("p").data, kv.data)


def test_mapping_lives_as_long_as_its_last_view(store: PrefixStore, folder: Path) -> None:
    keep(store, filled(5))
    kv = store.open("p")
    rows = kv.rows(1, TokenRange(0, 2))
    del kv
    assert len(mapped(folder)) == 1
    del rows
    assert mapped(folder) == []


def test_removed_prefix_stays_with_its_readers(store: PrefixStore, folder: Path) -> None:
    kv = filled(5)
    keep(store, kv)
    read = store.open("p")
    store.remove("p")
    store.remove("p")
    assert torch.equal(read.data, kv.data)
    with pytest.raises(NotFoundError, match="'p' is not in .*: prefill without it"):
        store.open("p")


def test_unsealed_prefix_is_not_there(store: PrefixStore, folder: Path) -> None:
    with store.create("p", 5) as writer:
        for layer in range(3):
            writer.write(layer, filled(5).export(layer, TokenRange(0, 5)))
        assert list(folder.iterdir()) == []
        with pytest.raises(NotFoundError):
            store.open("p")
    with pytest.raises(NotFoundError):
        store.open("p")


def test_writer_that_fails_leaves_nothing(store: PrefixStore, folder: Path) -> None:
    with pytest.raises(RuntimeError, match="interrupted"), store.create("p", 5):
        raise RuntimeError("interrupted")
    assert list(folder.iterdir()) == []


def test_seal_asks_for_every_layer(store: PrefixStore) -> None:
    with store.create("p", 5) as writer:
        writer.write(1, filled(5).export(1, TokenRange(0, 5)))
        with pytest.raises(AssertionError, match=r"layers \[0, 2\] of prefix p"):
            writer.seal()


def test_first_of_two_that_seal_one_name_stays(store: PrefixStore) -> None:
    first = filled(5, seed=1)
    with store.create("p", 5) as late:
        keep(store, first)
        for layer in range(3):
            late.write(layer, filled(5, seed=2).export(layer, TokenRange(0, 5)))
        late.seal()
    assert torch.equal(store.open("p").data, first.data)


@pytest.mark.parametrize("name", ["", ".", "..", "../p", "a/b", "/p", ".p", "p\n", "p\0", "x" * 129])
def test_names_stay_in_the_folder(store: PrefixStore, name: str) -> None:
    for verb in (store.open, store.remove, lambda name: store.create(name, 1)):
        with pytest.raises(InvalidArgumentError, match="is no name"):
            verb(name)


def test_link_out_of_the_folder_is_not_followed(store: PrefixStore, folder: Path) -> None:
    keep(store, filled(5), "q")
    (folder / "p").symlink_to(folder / "q")
    with pytest.raises(ConfigError, match="cannot be mapped"):
        store.open("p")


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
    else:
        content.clear()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("cut", ByteCountError),
        ("longer", ByteCountError),
        ("tokens", ByteCountError),
        ("bytes", ByteCountError),
        ("cut to a part of its header", LayoutMismatchError),
        ("magic", LayoutMismatchError),
        ("empty", LayoutMismatchError),
    ],
)
def test_spoiled_file_is_refused(store: PrefixStore, folder: Path, change: str, error: type[BatonError]) -> None:
    keep(store, filled(5))
    spoil(folder, change)
    with pytest.raises(error, match="remove it"):
        store.open("p")


def test_prefix_of_another_model_is_refused(store: PrefixStore, folder: Path) -> None:
    keep(store, filled(5))
    other = PrefixStore(folder, replace(LAYOUT, model_fingerprint="other"))
    with pytest.raises(LayoutMismatchError, match="prefill without it"):
        other.open("p")


def test_more_than_there_is_room_for_is_refused_at_once(store: PrefixStore, folder: Path) -> None:
    free = os.statvfs(folder)
    num_tokens = free.f_bavail * free.f_frsize // LAYOUT.token_bytes + 1
    with pytest.raises(ResourceExhaustedError, match="no room for"):
        store.create("p", num_tokens)
    assert list(folder.iterdir()) == []


def test_store_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder: make one in /dev/shm"):
        PrefixStore(tmp_path / "nowhere", LAYOUT)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_chains_that_begin_behind_a_shared_prefix_equal_one_process(folder: Path, num_ranks: int) -> None:
    torch.set_num_threads(1)
    decoder = random_decoder(num_layers=3)
    store, rng = PrefixStore(folder, decoder.layout), random.Random(num_ranks)
    ids = random_tokens(rng, 60, decoder)
    keep(store, cached_prefix(decoder, ids, 50))
    with ChainGroup(decoder, num_ranks) as group:
        for _ in range(4):
            start = rng.randint(1, 50)  # of what the file holds, a request may use less
            chunks = random_chunks(rng, TokenRange(start, 60), num_ranks)
            sent = group.payload_bytes()
            run = group.submit(group.prepare(ids, chunks, prefix=lambda: store.open("p")))
            assert_right(group, run)
            relayed = sum(chunk.end - start for chunk in chunks[:-1])
            assert group.payload_bytes() - sent == relayed * decoder.layout.token_bytes
            del run
    assert mapped(folder) == []
