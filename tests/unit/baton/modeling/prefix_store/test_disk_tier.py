"""A disk that does not answer is not waited for, and is used again once it answers."""

import queue
import threading
from concurrent import futures
from functools import partial
from pathlib import Path

import pytest

from baton.modeling.prefix_store import disk_tier
from baton.modeling.prefix_store.disk_tier import ANSWER_S, DiskTier
from baton.modeling.prefix_store.node import DiskPlace, NodeStore
from baton.types import KvLayout, TokenRange
from tests.support.engines.chains import until
from tests.support.engines.prefixes import PLENTY, hung, keep, random_kv, same
from tests.support.manual_clock import ManualClock

LAYOUT = KvLayout("model", 3, 2, 4, "float32")
WAIT_S = 30.0


def tier(clock: ManualClock, answer_s: float = ANSWER_S) -> DiskTier[str]:
    """One whose store is a word."""
    return DiskTier(lambda: "store", Path("/the/disk"), PLENTY, clock=clock, answer_s=answer_s)


def test_a_call_without_an_answer_is_left_to_itself_and_no_other_is_made_meanwhile() -> None:
    disk, answers = tier(ManualClock(), 0.01), threading.Event()
    assert (disk.ask(lambda store: answers.wait(WAIT_S), "none"), disk.fault.partition(":")[0]) == (
        "none",
        "/the/disk does not answer",
    )
    assert disk.ask(str.upper, "none") == "none"
    answers.set()
    until(lambda: not disk.fault)
    assert disk.ask(str.upper, "none") == "STORE"


def test_a_disk_that_hangs_is_noticed_although_nobody_waits_for_it() -> None:
    clock, answers = ManualClock(), threading.Event()
    disk = tier(clock)
    disk.begin(lambda store: (answers.wait(WAIT_S), None)[1])
    assert not disk.fault
    clock.advance(ANSWER_S)
    assert disk.fault
    answers.set()
    until(lambda: not disk.fault)


def test_work_is_waited_for_while_the_disk_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait but the last ends without a result, after one more answer."""
    disk, files, seen = tier(ManualClock()), queue.Queue[bool](), queue.Queue[None]()
    waits = iter([True] * 5 + [False])

    def work(store: str) -> str:
        while files.get(timeout=WAIT_S):
            disk.answered()
            seen.put(None)
        return store

    def wait(running: list[futures.Future[str]], _: float) -> object:
        files.put(has_more := next(waits))
        if has_more:
            seen.get(timeout=WAIT_S)
        return futures.wait(running, 0 if has_more else WAIT_S)

    monkeypatch.setattr(disk_tier, "wait", wait)
    assert disk.ask(work, "none") == "store"
    assert not disk.fault


def test_a_disk_that_hangs_as_it_is_opened_takes_nothing_from_memory(folder: Path, tmp_path: Path) -> None:
    disk, kv = DiskPlace(tmp_path / "disk", PLENTY, answer_s=0.01), random_kv(LAYOUT, 10)
    make = partial(NodeStore, folder, LAYOUT, limit_bytes=PLENTY, clock=ManualClock(1e9), disk=disk)
    with hung(disk.folder):
        used, ended = make(), make()
        blocks = used.blocks
        keep(blocks, kv, ["a", "b"])
        assert blocks.sink(["a", "b"], TokenRange(0, 10), 5) == []
        assert (blocks.names(), blocks.has("a"), blocks.has("c")) == (["b", "a"], True, False)
        assert same(blocks.open_leading(["a", "b", "c"], 5).blocks, kv)
        assert "does not answer" in blocks.holdings().disk_fault
        ended.close()
    until(lambda: not blocks.holdings().disk_fault)
    blocks.sink(["a", "b"], TokenRange(0, 10), 5)
    (folder / "a").unlink()
    assert same(blocks.open(["a", "b"], 5), kv)
    used.close()
    until(lambda: not disk.folder.exists())


def test_a_disk_that_cannot_be_used_is_done_without(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    disk = DiskPlace(tmp_path / "file" / "disk", PLENTY)
    made = NodeStore(folder, LAYOUT, limit_bytes=PLENTY, clock=ManualClock(1e9), disk=disk)
    assert "cannot be used (Not a directory)" in made.blocks.holdings().disk_fault
    made.close()
