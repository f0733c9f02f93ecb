"""Memory of an emulated device. An arena is a set of regions of this process's memory that represent device memory.

`baton.modeling.device.emulated` creates an arena for each device, and `baton.modeling.kv.row_memory` allocates the KV
of sequences in the arena. An arena counts the bytes that are in use. The address of a byte shows whether the byte is in
device memory or in host memory. `require_home` and `Arena.require` check addresses, because bytes may move between the
two memories only over the device's link.
"""

import threading
from bisect import bisect_right, insort
from collections import deque

_lock = threading.Lock()
_regions: list[tuple[int, int]] = []
"""Start and end address of each region of all arenas in this process, in ascending order and without overlaps."""
_gone: "deque[tuple[Arena, tuple[int, int]]]" = deque()
"""Regions that `remove_region` has removed from an arena, but that have not been deleted from `_regions` yet."""


class WrongMemoryError(AssertionError):
    """Device memory was accessed as host memory, or host memory as device memory. This is a bug in the program."""


class Arena:
    """Memory of one emulated device. Thread-safe."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Create an arena. `limit_bytes` is the maximum number of bytes in use at the same time. None: no limit."""
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        """Maximum number of bytes that have been in use at the same time."""
        self._num_bytes = 0
        self._given: deque[int] = deque()
        """Sizes in bytes that `give` has freed, but that have not been subtracted from `_num_bytes` yet."""
        self._own: list[tuple[int, int]] = []

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that are in use now."""
        with _lock:
            self._forget_given()
            return self._num_bytes

    def add_region(self, start: int, num_bytes: int) -> None:
        """Make a region part of the device's memory until `remove_region` is called. Its bytes do not count as in use
        until `take` counts them."""
        with _lock:
            _forget_gone()
            insort(_regions, (start, start + num_bytes))
            insort(self._own, (start, start + num_bytes))

    def remove_region(self, start: int, num_bytes: int) -> None:
        """Make a region host memory again. This method takes no lock, because Python's garbage collector may call it on
        any thread and at any statement."""
        _gone.append((self, (start, start + num_bytes)))

    def take(self, num_bytes: int) -> None:
        """Count `num_bytes` bytes as in use. If they would exceed the limit, raises MemoryError and does not count
        them."""
        with _lock:
            self._forget_given()
            if self.limit_bytes is not None and self._num_bytes + num_bytes > self.limit_bytes:
                raise MemoryError(
                    f"{num_bytes} bytes in addition to {self._num_bytes} exceed the device's {self.limit_bytes}"
                )
            self._num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._num_bytes)

    def give(self, num_bytes: int) -> None:
        """Count `num_bytes` bytes as free again. This method takes no lock, because Python's garbage collector may call
        it on any thread and at any statement."""
        self._given.append(num_bytes)

    def require(self, address: int, num_bytes: int) -> None:
        """Raise WrongMemoryError unless all `num_bytes` bytes from `address` on are in this arena."""
        with _lock:
            _forget_gone()
            is_there = _holds(self._own, address, num_bytes)
        if num_bytes and not is_there:
            raise WrongMemoryError(f"{num_bytes} bytes at {address:#x} are host memory: fetch them over the link first")

    def _forget_given(self) -> None:
        """Subtract the bytes in `_given` from the count. The caller holds the lock."""
        while self._given:
            self._num_bytes -= self._given.popleft()


def require_home(address: int) -> None:
    """Raise WrongMemoryError if the address belongs to an emulated device instead of host memory."""
    if not _regions:
        return
    with _lock:
        _forget_gone()
        is_there = _holds(_regions, address, 1)
    if is_there:
        raise WrongMemoryError(f"{address:#x} is memory of an emulated device: copy it over the link first")


def _forget_gone() -> None:
    """Delete removed regions from the lists. The caller holds the lock."""
    while _gone:
        arena, region = _gone.popleft()
        _regions.remove(region)
        arena._own.remove(region)


def _holds(regions: list[tuple[int, int]], address: int, num_bytes: int) -> bool:
    at = bisect_right(regions, address, key=lambda region: region[0]) - 1
    return at >= 0 and address + num_bytes <= regions[at][1]
