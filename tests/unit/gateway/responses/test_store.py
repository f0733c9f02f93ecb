"""Responses are kept by number, bytes and time, and forgotten oldest first."""

from typing import Any

from gateway.responses.bodies import Item
from gateway.responses.store import ResponseStore, StoreLimits
from tests.support.manual_clock import ManualClock

ITEMS = (Item(role="user", content="x" * 100),)


def response(number: int) -> dict[str, Any]:
    return {"id": f"resp_{number}"}


def kept(store: ResponseStore, num_ids: int = 5) -> list[int]:
    return [number for number in range(num_ids) if store.get("me", f"resp_{number}") is not None]


def filled(limits: StoreLimits, clock: ManualClock, num: int = 5) -> ResponseStore:
    store = ResponseStore(limits, clock)
    for number in range(num):
        store.put("me", response(number), ITEMS)
    return store


def test_the_oldest_go_when_there_are_too_many() -> None:
    assert kept(filled(StoreLimits(max_responses=2), ManualClock())) == [3, 4]
    assert kept(filled(StoreLimits(max_responses=0), ManualClock())) == []


def test_the_oldest_go_when_they_are_too_large() -> None:
    one = filled(StoreLimits(), ManualClock(), num=1).num_bytes
    assert 100 < one < 300
    store = filled(StoreLimits(max_bytes=3 * one), ManualClock())
    assert kept(store) == [2, 3, 4] and store.num_bytes == 3 * one
    store.put("me", response(9), ITEMS * 9)
    assert kept(store) == [2, 3, 4], "one that has no room at all displaces none"


def test_all_go_in_time() -> None:
    clock = ManualClock()
    store = filled(StoreLimits(keep_s=10), clock, num=2)
    clock.advance(6)
    store.put("me", response(2), ITEMS)
    clock.advance(4)
    assert kept(store) == [2] and len(store) == 1
    clock.advance(6)
    assert kept(store) == [] and store.num_bytes == 0


def test_others_neither_find_nor_forget_it() -> None:
    store = filled(StoreLimits(), ManualClock(), num=1)
    assert store.get("you", "resp_0") is None and not store.delete("you", "resp_0")
    assert store.delete("me", "resp_0") and not store.delete("me", "resp_0")
    assert store.num_bytes == 0
