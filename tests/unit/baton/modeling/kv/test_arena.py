"""The memory of an emulated device: its addresses are its own until their memory is gone."""

import pytest

from baton.modeling.kv import arena
from baton.modeling.kv.arena import Arena, WrongMemoryError, require_home

START, SIZE = 1 << 60, 4096
"""Addresses that no process has."""


def test_addresses_are_the_device_s_until_they_are_removed() -> None:
    device = Arena()
    device.add_region(START, SIZE)
    device.require(START, SIZE)
    with pytest.raises(WrongMemoryError, match="memory of an emulated device"):
        require_home(START + SIZE - 1)
    require_home(START + SIZE)
    device.remove_region(START, SIZE)
    require_home(START)
    with pytest.raises(WrongMemoryError, match="are host memory"):
        device.require(START, 1)


def test_memory_may_go_while_the_lists_are_locked() -> None:
    """Python's collector runs finalizers wherever it likes, in the thread that has the lock, too."""
    device = Arena(limit_bytes=SIZE)
    device.add_region(START, SIZE)
    device.take(SIZE)
    with arena._lock:
        device.give(SIZE)
        device.remove_region(START, SIZE)
    assert device.num_bytes == 0
    device.take(SIZE)
    require_home(START)
    device.add_region(START, SIZE)
    device.require(START, SIZE)
    device.remove_region(START, SIZE)
    require_home(START)
