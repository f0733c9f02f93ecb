"""The prefix store against a plain model of it: what is there and when it was used, who reads, who writes."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from baton.errors import StalePrefixError
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.store import BlockRoom
from baton.types import KvLayout, TokenRange
from tests.support.engines.prefixes import file_bytes, fill, store_in
from tests.support.manual_clock import ManualClock

LAYOUT = KvLayout("model", 1, 1, 2, "float32")
BLOCK = 2
SIZE = file_bytes(LAYOUT, BLOCK)
MAX_BLOCKS = 4
PATHS = st.text("xy", min_size=1, max_size=5)
"""A prompt: its blocks are named by its beginnings."""


def names(path: str) -> list[str]:
    return [path[: end + 1] for end in range(len(path))]


def content(path: str) -> KvBuffer:
    """Equal names mean equal KV."""
    buffer = KvBuffer(LAYOUT, TokenRange(0, len(path) * BLOCK))
    for index, name in enumerate(names(path)):
        buffer.data[:, index * BLOCK : (index + 1) * BLOCK] = float(sum(map(ord, name)) + len(name))
    return buffer


@dataclass(eq=False)
class Writing:
    """Room that somebody has taken."""

    path: str
    taken_ns: int
    room: BlockRoom
    written: list[str]
    """Blocks that it is to have."""
    is_open: bool = True


@dataclass(eq=False)
class Reading:
    """Blocks that somebody holds."""

    path: str
    blocks: tuple[KvBuffer, ...] = field(repr=False)


class StoreWalk(RuleBasedStateMachine):
    """Every rule does one thing to the folder and to the model."""

    writing = Bundle("writing")
    reading = Bundle("reading")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="baton-test-"))
        self.clock = ManualClock(1e9)
        self.store = store_in(self.folder, LAYOUT, limit_bytes=MAX_BLOCKS * SIZE, clock=self.clock)
        self.used: dict[str, int] = {}
        """Sealed blocks, and when they were used (unix ns)."""
        self.rooms: list[Writing] = []
        self.readers: list[Reading] = []

    def teardown(self) -> None:
        for each in self.rooms:
            each.room.drop()
        self.readers.clear()
        shutil.rmtree(self.folder)

    @rule(target=writing, path=PATHS)
    def take(self, path: str) -> Writing:
        now_ns = self._now_ns()
        written, evicted = self._expected(path, now_ns)
        room = self.store.take(names(path), TokenRange(0, len(path) * BLOCK), BLOCK)
        assert [writer.name for writer in room.writers] == written
        assert room.evicted == evicted
        self.rooms.append(Writing(path, now_ns, room, written))
        return self.rooms[-1]

    @rule(at=writing)
    def seal(self, at: Writing) -> None:
        if at.is_open:
            fill(at.room, content(at.path))
            for name in at.written:
                self.used.setdefault(name, at.taken_ns - names(at.path).index(name))
            self._close(at)

    @rule(at=writing)
    def drop(self, at: Writing) -> None:
        at.room.drop()
        self._close(at)

    @rule(target=reading, path=PATHS)
    def open(self, path: str) -> object:
        now_ns = self._now_ns()
        num_there = next((index for index, name in enumerate(names(path)) if name not in self.used), len(path))
        for index, name in enumerate(names(path)[:num_there]):
            self.used[name] = now_ns - index
        if num_there < len(path):
            with pytest.raises(StalePrefixError):
                self.store.open(names(path), BLOCK)
            return multiple()
        self.readers.append(Reading(path, self.store.open(names(path), BLOCK)))
        return self.readers[-1]

    @rule(at=reading)
    def close(self, at: Reading) -> None:
        at.blocks = ()
        self.readers = [each for each in self.readers if each is not at]

    @invariant()
    def the_bound_holds(self) -> None:
        num_unsealed = sum(len(each.written) for each in self.rooms if each.is_open)
        held = self.store.holdings()
        assert held.num_blocks == len(self.used) + num_unsealed
        assert held.num_bytes == held.num_blocks * SIZE <= held.limit_bytes

    @invariant()
    def what_was_used_is_known_and_in_order(self) -> None:
        assert self.store.names() == sorted(self.used, key=lambda name: (self.used[name], name))

    @invariant()
    def what_is_read_stays_what_it_was(self) -> None:
        for each in self.readers:
            assert set(names(each.path)) <= self.used.keys()
            assert torch.equal(torch.cat([block.data for block in each.blocks], dim=1), content(each.path).data)

    def _expected(self, path: str, now_ns: int) -> tuple[list[str], list[str]]:
        """Update the model; return the blocks that have room, and those that are evicted for them."""
        read = {name for each in self.readers for name in names(each.path)}
        evictable = sorted((set(self.used) - set(names(path))), key=lambda name: (self.used[name], name))
        num_files = len(self.used) + sum(len(each.written) for each in self.rooms if each.is_open)
        written, evicted = [], []
        for index, name in enumerate(names(path)):
            if name in self.used:
                self.used[name] = now_ns - index
                continue
            while num_files >= MAX_BLOCKS and evictable:
                coldest = evictable.pop(0)
                if coldest not in read:
                    evicted.append(coldest)
                    del self.used[coldest]
                    num_files -= 1
            if num_files >= MAX_BLOCKS:
                break
            written.append(name)
            num_files += 1
        return written, evicted

    def _close(self, at: Writing) -> None:
        at.is_open = False
        self.rooms = [each for each in self.rooms if each is not at]

    def _now_ns(self) -> int:
        self.clock.advance(1.0)
        return self.clock.unix_ns()


TestStoreWalk = StoreWalk.TestCase
TestStoreWalk.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
