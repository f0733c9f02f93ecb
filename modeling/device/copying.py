"""Links whose copies threads of the host make: of the CPU to itself, and of an emulated device."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from baton.errors import ConfigError
from modeling.device.port import Copies, Finished, Link, Running, Transfer, num_bytes_of
from modeling.kv.buffers import bytes_of

CopyTensor = Callable[[Tensor, Tensor], None]
"""Copies `(to, from)`, and returns when the copy is done."""


def copy_bytes(to: Tensor, source: Tensor) -> None:
    """Copy a tensor on one core and without the GIL: torch would take the cores that compute."""
    np.copyto(np.asarray(bytes_of(to)), np.asarray(bytes_of(source)))


class ThreadLink:
    """A Link whose fetches run on a thread of its own, while others compute; what is stored, the caller copies."""

    def __init__(self, copy: CopyTensor = copy_bytes) -> None:
        """`copy` is the function that copies one tensor."""
        self._copy = copy
        self._threads: dict[str, ThreadPoolExecutor] = {}
        """A thread for each direction that was used, by name."""
        self._starting = threading.Lock()
        self._num_bytes_fetched = self._num_bytes_stored = 0  # each counted by one thread

    @property
    def num_bytes_fetched(self) -> int:
        """Return the bytes copied to the device so far."""
        return self._num_bytes_fetched

    @property
    def num_bytes_stored(self) -> int:
        """Return the bytes copied home so far."""
        return self._num_bytes_stored

    def fetch(self, copies: Copies) -> Transfer:
        """Begin to copy, on the thread."""
        return Running(self._submit("kv-fetch", self._fetch, copies))

    def store(self, copies: Copies) -> Transfer:
        """Copy, and return when that is done."""
        self._store(copies)
        return Finished()

    def rest(self) -> None:
        """Wait for the copies that were asked for, and end the threads."""
        with self._starting:
            threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.shutdown()

    def _submit(self, name: str, work: Callable[[Copies], None], copies: Copies) -> "Future[None]":
        with self._starting:
            if name not in self._threads:
                self._threads[name] = ThreadPoolExecutor(1, thread_name_prefix=name)
            return self._threads[name].submit(work, copies)

    def _fetch(self, copies: Copies) -> None:
        for to, source in copies:
            self._copy(to, source)
            self._num_bytes_fetched += source.nbytes

    def _store(self, copies: Copies) -> None:
        for to, source in copies:
            self._copy(to, source)
            self._num_bytes_stored += source.nbytes


@dataclass(frozen=True)
class LinkRate:
    """How fast a link is. Infinite: as fast as the host copies."""

    bytes_per_s: float = float("inf")
    """In each direction, at the same time."""
    latency_s: float = 0.0
    """Seconds before the first byte of a transfer has come."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigError(f"a link of {self.bytes_per_s} bytes a second brings nothing: use a rate above 0")
        if not 0 <= self.latency_s < float("inf"):
            raise ConfigError(f"a latency of {self.latency_s} s is out of range: use 0 or more seconds")


UNBOUND = LinkRate()
"""A link as fast as the host copies."""


class _Pace:
    """One direction's time: transfers follow one another, and none is done sooner than at the link's rate."""

    def __init__(self, rate: LinkRate) -> None:
        self._rate = rate
        self._free_s = 0.0
        """Time at which the last transfer was due, on time.monotonic."""

    def keep(self, began_s: float, num_bytes: int) -> None:
        """Wait until a transfer that began to be copied then would be done. An overslept wait delays none behind it."""
        took_s = self._rate.latency_s + num_bytes / self._rate.bytes_per_s
        self._free_s = max(self._free_s, began_s) + took_s
        left_s = self._free_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)  # noqa: TID251 - the time that the emulated link takes


class PacedLink(ThreadLink):
    """A Link that copies for real, and takes as long as one of the given rate, in both directions at the same time."""

    def __init__(self, rate: LinkRate, copy: CopyTensor = copy_bytes) -> None:
        super().__init__(copy)
        self._in, self._out = _Pace(rate), _Pace(rate)
        self.fetch_s = 0.0
        """Seconds in which fetches were on their way, together."""

    def store(self, copies: Copies) -> Transfer:
        """Begin to copy, on a thread of its own."""
        return Running(self._submit("kv-store", self._store, copies))

    def _fetch(self, copies: Copies) -> None:
        began_s = time.monotonic()
        super()._fetch(copies)
        self._in.keep(began_s, num_bytes_of(copies))
        self.fetch_s += time.monotonic() - began_s

    def _store(self, copies: Copies) -> None:
        began_s = time.monotonic()
        super()._store(copies)
        self._out.keep(began_s, num_bytes_of(copies))


class LinkAccess:
    """HostAccess to a device's memory: over its link, through memory of the host's that the link can reach."""

    def __init__(self, link: Link, make_staging: Callable[[Tensor], Tensor]) -> None:
        """`make_staging` makes home memory of the shape and dtype of a tensor, contiguous."""
        self._link = link
        self._make_staging = make_staging

    @classmethod
    def plain(cls, link: Link) -> Self:
        """Return the access through memory that is not pinned."""
        return cls(link, lambda like: torch.empty(like.shape, dtype=like.dtype))

    def read(self, source: Tensor) -> memoryview:
        """Return a copy."""
        staging = self._make_staging(source)
        self._link.store([(staging, source)]).result()
        return bytes_of(staging)

    def write(self, to: Tensor, data: memoryview) -> None:
        """Copy to the staging memory, then over the link."""
        staging = self._make_staging(to)
        np.copyto(np.asarray(bytes_of(staging)), np.frombuffer(data, np.uint8))
        self._link.fetch([(to, staging)]).result()
