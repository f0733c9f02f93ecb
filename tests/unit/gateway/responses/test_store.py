"""Responses are kept by number, bytes and time, and forgotten oldest first."""

import time
import tracemalloc

import pytest

from baton.limits import MAX_BODY_BYTES, MAX_ITEMS
from gateway.bodies import Part
from gateway.responses.bodies import Item
from gateway.responses.items import named
from gateway.responses.store import ResponseStore, StoreLimits, written
from tests.support.kernels.os_memory import without_collections
from tests.support.manual_clock import ManualClock

RESPONSE = b'{"output":[]}'
CONVERSATION = written([Item(role="user", content="x" * 100)])


def kept(store: ResponseStore, num_ids: int = 5) -> list[int]:
    return [number for number in range(num_ids) if store.get("me", f"resp_{number}") is not None]


def filled(limits: StoreLimits, clock: ManualClock, num: int = 5) -> ResponseStore:
    store = ResponseStore(limits, clock)
    for number in range(num):
        store.put("me", f"resp_{number}", RESPONSE, CONVERSATION)
    return store


def test_the_oldest_go_when_there_are_too_many() -> None:
    assert kept(filled(StoreLimits(max_responses=2), ManualClock())) == [3, 4]
    assert kept(filled(StoreLimits(max_responses=0), ManualClock())) == []


def test_the_oldest_go_when_they_are_too_large() -> None:
    one = filled(StoreLimits(), ManualClock(), num=1).num_bytes
    assert len(RESPONSE) + len(CONVERSATION) < one < 1200
    store = filled(StoreLimits(max_bytes=3 * one), ManualClock())
    assert kept(store) == [2, 3, 4] and store.num_bytes == 3 * one
    store.put("me", "resp_9", RESPONSE, bytes(3 * one))
    assert kept(store) == [2, 3, 4], "one that has no room at all displaces none"


def test_all_go_in_time() -> None:
    clock = ManualClock()
    store = filled(StoreLimits(keep_s=10), clock, num=2)
    clock.advance(6)
    store.put("me", "resp_2", RESPONSE, CONVERSATION)
    clock.advance(4)
    assert kept(store) == [2] and len(store) == 1
    clock.advance(6)
    assert kept(store) == [] and store.num_bytes == 0


@pytest.mark.parametrize(
    ("items", "number"),
    [
        ([], 2000),
        ([Item(type="reasoning")] * MAX_ITEMS, 20),
        ([Item(role="user", content="x" * 2**20)], 3),
        ([Item(role="user", content=[Part(type="input_text", text="hi")] * 1000)], 20),
    ],
    ids=["short", "items", "text", "parts"],
)
def test_the_bytes_that_are_counted_are_those_of_the_memory(items: list[Item], number: int) -> None:
    store = ResponseStore(StoreLimits(), ManualClock())
    tracemalloc.start()
    try:
        for index in range(number):
            store.put(f"{'owner':<58}{index:6}", f"resp_{index:032}", b" " * len(RESPONSE) + RESPONSE, written(items))
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert measured / 1.5 < store.num_bytes < measured * 1.5


def test_a_conversation_at_the_limits_takes_the_loop_little_time() -> None:
    items = [Item(type="reasoning", content="x" * (MAX_BODY_BYTES // MAX_ITEMS)) for _ in range(MAX_ITEMS)]
    store, conversation = ResponseStore(StoreLimits(), ManualClock()), written(items)
    with without_collections():
        before_s = time.thread_time()
        named(items, set())
        store.put("me", "resp_0", RESPONSE, conversation)
        took_s = time.thread_time() - before_s
    assert took_s < 0.05
    kept = store.get("me", "resp_0")
    assert kept is not None and list(kept.read_items()) == items


def test_others_neither_find_nor_forget_it() -> None:
    store = filled(StoreLimits(), ManualClock(), num=1)
    assert store.get("you", "resp_0") is None and not store.delete("you", "resp_0")
    assert store.delete("me", "resp_0") and not store.delete("me", "resp_0")
    assert store.num_bytes == 0
