"""The memory itself: who may map it, what is mapped in its place, and that nothing of it stays."""

import fcntl
import itertools
import mmap
import os
import resource
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_MESSAGE_BYTES
from baton.transport.shared_memory import MAX_MAPPED_BYTES, CellPool, SharedCells, map_memory, payload_at
from baton.v1 import kv_pb2
from tests.support.wire.shared_push import files_in_memory, shared_files

CELL_BYTES = 8192


@pytest.fixture
def cells() -> Iterator[SharedCells]:
    made = SharedCells(3, CELL_BYTES)
    yield made
    made.close()


def mapping(cells: SharedCells) -> mmap.mmap:
    mapped = map_memory(cells.name)
    assert mapped is not None
    return mapped


def taken(cells: SharedCells) -> int:
    offset = cells.take()
    assert offset is not None
    return offset


def test_what_is_written_is_seen_through_the_mapping(cells: SharedCells) -> None:
    offset, mapped = taken(cells), mapping(cells)
    cells.write(offset, memoryview(b"payload"))
    assert bytes(payload_at(mapped, kv_pb2.SharedPiece(offset=offset, num_bytes=7))) == b"payload"


def test_each_cell_is_taken_once_and_the_latest_given_back_first(cells: SharedCells) -> None:
    offsets = [taken(cells) for _ in range(3)]
    assert len(set(offsets)) == 3
    assert cells.take() is None
    for offset in offsets:
        cells.give_back(offset)
    assert [cells.take() for _ in range(3)] == offsets[::-1]


def test_cells_do_not_overlap_and_lie_in_the_memory(cells: SharedCells) -> None:
    offsets = sorted(taken(cells) for _ in range(3))
    assert [after - before for before, after in itertools.pairwise(offsets)] == [CELL_BYTES] * 2
    assert offsets[-1] + CELL_BYTES == cells.name.num_bytes


def test_mapping_cannot_be_written(cells: SharedCells) -> None:
    mapped = mapping(cells)
    with pytest.raises(TypeError, match="read-only|readonly"):
        mapped[0] = 1


def test_memory_belongs_to_its_user_alone_and_keeps_its_size(cells: SharedCells) -> None:
    descriptor = cells.name.descriptor
    found = os.fstat(descriptor)
    assert (found.st_mode & 0o777, found.st_uid, found.st_nlink) == (0o600, os.geteuid(), 0)
    for size in (0, cells.name.num_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_mapping_outlives_the_sender(cells: SharedCells) -> None:
    own = SharedCells(1, CELL_BYTES)
    offset = taken(own)
    own.write(offset, memoryview(b"kept"))
    mapped = mapping(own)
    own.close()
    assert mapped[offset : offset + 4] == b"kept"


def test_nothing_is_left_when_both_ends_are_done() -> None:
    before, folder = shared_files(), files_in_memory()
    own = SharedCells(1, CELL_BYTES)
    mapped = mapping(own)
    assert len(shared_files()) > len(before)
    own.close()
    del mapped
    assert shared_files() == before
    assert files_in_memory() == folder


def test_closed_memory_is_not_mapped() -> None:
    own = SharedCells(1, CELL_BYTES)
    own.close()
    assert map_memory(own.name) is None


def named(descriptor: int, num_bytes: int, key: bytes) -> kv_pb2.SharedMemory:
    return kv_pb2.SharedMemory(pid=os.getpid(), descriptor=descriptor, num_bytes=num_bytes, key=key)


OF_ANOTHER_USER = pytest.param(
    "another user's", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
)


@pytest.mark.parametrize("flaw", ["not sealed", "others may read", "has a name", "no key", "a pipe", OF_ANOTHER_USER])
def test_other_files_are_not_mapped(flaw: str, tmp_path: Path) -> None:
    key, num_bytes = secrets.token_bytes(16), 2 * mmap.PAGESIZE
    others: list[int] = []
    if flaw == "a pipe":
        descriptor, other = os.pipe()
        others.append(other)
    elif flaw == "has a name":
        descriptor, _ = tempfile.mkstemp(dir=tmp_path)
    else:
        descriptor = os.memfd_create("baton-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if flaw != "a pipe":
            os.fchmod(descriptor, 0o644 if flaw == "others may read" else 0o600)
            os.ftruncate(descriptor, num_bytes)
            os.pwrite(descriptor, bytes(16) if flaw == "no key" else key, 0)
        if flaw == "another user's":
            os.fchown(descriptor, 65534, 65534)
        if flaw not in ("a pipe", "has a name", "not sealed"):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        assert map_memory(named(descriptor, num_bytes, key)) is None
    finally:
        for each in (descriptor, *others):
            os.close(each)


def test_payload_ends_where_the_memory_ends(cells: SharedCells) -> None:
    mapped = mapping(cells)
    last = cells.name.num_bytes - 8
    assert len(payload_at(mapped, kv_pb2.SharedPiece(offset=last, num_bytes=8))) == 8
    with pytest.raises(InvalidArgumentError, match="out of range"):
        payload_at(mapped, kv_pb2.SharedPiece(offset=last, num_bytes=9))


def test_payload_is_no_larger_than_a_message_of_a_stream() -> None:
    own = SharedCells(1, MAX_MESSAGE_BYTES + 1)
    mapped, offset = mapping(own), taken(own)
    own.close()
    assert len(payload_at(mapped, kv_pb2.SharedPiece(offset=offset, num_bytes=MAX_MESSAGE_BYTES))) == MAX_MESSAGE_BYTES
    with pytest.raises(InvalidArgumentError, match="out of range"):
        payload_at(mapped, kv_pb2.SharedPiece(offset=offset, num_bytes=MAX_MESSAGE_BYTES + 1))


def test_memory_without_bound_is_not_mapped() -> None:
    own = SharedCells(1, MAX_MAPPED_BYTES)
    assert map_memory(own.name) is None
    own.close()


def test_key_is_no_payload(cells: SharedCells) -> None:
    mapped = mapping(cells)
    with pytest.raises(InvalidArgumentError, match="out of range"):
        payload_at(mapped, kv_pb2.SharedPiece(offset=0, num_bytes=16))


def test_without_room_there_are_no_cells_and_nothing_stays_open() -> None:
    before = shared_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CELL_BYTES, hard))
    try:
        assert CellPool(4, CELL_BYTES).take() is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert shared_files() == before


def test_a_pool_keeps_few_memories_and_none_when_it_is_closed() -> None:
    before = shared_files()
    pool = CellPool(1, CELL_BYTES, most_kept=1)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    assert first.take() is not None
    pool.give_back(second)
    pool.give_back(first)
    assert pool.take() is first
    assert first.take() is not None  # all claims of the push before have ended
    pool.close()
    pool.give_back(first)
    pool.close()
    assert shared_files() == before
