"""A topology that tests share is in its initial state for each of them, and starts anew only where it must be."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.clusters.on_ray.topology import Topology


class Shared:
    """Numbers that are started and ended; the test says which are whole."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.num_started = 0
        self.is_whole = True
        self.topology = Topology(self.make, self.check)

    @contextmanager
    def make(self) -> Iterator[int]:
        self.num_started += 1
        yield self.num_started
        self.ended.append(self.num_started)

    def check(self, running: int) -> None:
        assert running == self.num_started
        assert self.is_whole


def test_what_is_whole_is_shared_until_it_is_closed() -> None:
    shared = Shared()
    for _ in range(2):
        shared.topology.prepare()
        shared.topology.check()
    assert (shared.topology.running, shared.ended) == (1, [])
    shared.topology.close()
    shared.topology.close()
    assert (shared.topology.running, shared.ended) == (None, [1])


def test_what_a_test_says_it_broke_is_started_anew() -> None:
    shared = Shared()
    shared.topology.prepare()
    shared.topology.is_broken = True
    shared.topology.prepare()
    assert (shared.topology.running, shared.ended, shared.topology.is_broken) == (2, [1], False)


def test_what_is_found_broken_fails_who_looks_and_is_started_anew() -> None:
    shared = Shared()
    shared.topology.prepare()
    shared.is_whole = False
    with pytest.raises(AssertionError):
        shared.topology.check()
    shared.is_whole = True
    shared.topology.prepare()
    assert (shared.topology.running, shared.ended) == (2, [1])
