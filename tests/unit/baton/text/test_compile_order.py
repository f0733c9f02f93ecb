"""Forms of all sizes get their share of the thread that compiles them, and none waits for ever."""

import random

import pytest

from baton.text.compile_order import CompileOrder

SMALL, LARGE = 2**16, 2**26


def taken(order: CompileOrder[str], number: int) -> str:
    return "".join(order.take() for _ in range(number))


def test_a_small_form_does_not_wait_for_a_backlog_of_large_ones() -> None:
    order = CompileOrder[str]()
    for _ in range(20):
        order.add("L", LARGE)
    for _ in range(5):  # the backlog grows as fast as it is compiled
        assert taken(order, 1) == "L"
        order.add("L", LARGE)
        order.add("s", SMALL)
        assert taken(order, 1) == "s"


def test_a_flood_of_small_forms_is_as_large_as_the_large_form_that_waits() -> None:
    order = CompileOrder[str]()
    order.add("L", LARGE)
    num_before = 0
    while True:
        order.add("s", SMALL)
        if order.take() == "L":
            break
        num_before += 1
    assert num_before == LARGE // SMALL - 1


def test_equal_forms_keep_their_order() -> None:
    order = CompileOrder[str]()
    for name in "abcd":
        order.add(name, SMALL)
    assert taken(order, 4) == "abcd"


def test_dropped_forms_use_no_share_of_their_class() -> None:
    order = CompileOrder[str]()
    for name in "xsxx":
        order.add(name, SMALL)
    for name in "ml":
        order.add(name, 3 * SMALL)
    order.drop(lambda name: name == "x")
    order.add("t", SMALL)
    assert len(order) == 4
    assert taken(order, 4) == "stml"
    with pytest.raises(IndexError):
        order.take()


@pytest.mark.parametrize("seed", range(5))
def test_a_form_waits_for_at_most_one_form_of_each_larger_class(seed: int) -> None:
    rng, order = random.Random(seed), CompileOrder[int]()
    for _ in range(500):
        order.add(num_bytes := rng.choice([2**power for power in range(17, 28)]), num_bytes)
    while order:
        order.add(SMALL, SMALL)
        before = list[int]()
        while (size := order.take()) != SMALL:
            before.append(size)
        assert len(before) == len(set(before)), before
        if order:
            order.take()
