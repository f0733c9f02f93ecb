"""Links between host memory and device memory whose copies run on host threads. Used by the CPU device and by the
emulated device."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Self

import numpy as np
import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.device.heads import PickedHeads, RowCopies
from baton.modeling.device.port import Copies, Link, Running, num_bytes_of
from baton.modeling.kernels import native
from baton.modeling.kv.buffers import Writes, bytes_of
from baton.modeling.kv.staging import FRAME_BYTES, NUM_FRAMES, StagingFrames
from baton.modeling.kv.transfers import DoneTransfer, Transfer

CopyTensor = Callable[[Tensor, Tensor], None]
"""Function `copy(target, source)` that returns when the copy is done."""


def copy_bytes(to: Tensor, source: Tensor) -> None:
    """Copy a tensor on one core, without holding the GIL. Torch's own copy is not used, because it would occupy the
    cores that compute."""
    np.copyto(np.asarray(bytes_of(to)), np.asarray(bytes_of(source)))


class ThreadLink:
    """Link whose copies to the device (fetches) run on a separate thread, while other threads compute. Copies to host
    memory (stores) run on the caller's thread. The subclass PacedLink runs them on another separate thread."""

    def __init__(self, copy: CopyTensor = copy_bytes) -> None:
        """Create a link. `copy(target, source)` copies one tensor."""
        self._copy = copy
        self._threads: dict[str, ThreadPoolExecutor] = {}
        """Threads by direction: `kv-fetch` for copies to the device, `kv-store` for copies to host memory. Only
        PacedLink uses `kv-store`. A thread is created when it is first used."""
        self._starting = threading.Lock()
        self._num_bytes_fetched = self._num_bytes_stored = 0  # each is changed by one thread only

    @property
    def num_bytes_fetched(self) -> int:
        """Return the number of bytes copied to the device so far."""
        return self._num_bytes_fetched

    @property
    def num_bytes_stored(self) -> int:
        """Return the number of bytes copied to host memory so far."""
        return self._num_bytes_stored

    def queued(self) -> Transfer:
        """Return a transfer that has ended. The host computes, so that no work is queued."""
        return DoneTransfer()

    def fetch(self, copies: Copies, *, after: Transfer | None) -> Transfer:
        """Start to copy tensors to the device when `after` has ended (None: at once), on the thread for fetches."""

        def work() -> None:
            if after is not None:
                after.wait()
            self._copy_all(copies)

        return self._begin_fetch(work, num_bytes_of(copies))

    def fetch_heads(self, heads: PickedHeads) -> Transfer:
        """Start to copy selected keys and values to the device, on the thread for fetches."""
        args = heads.home_B, heads.there_B, heads.pairs_BGK2, heads.num_BG, heads.head_bytes
        return self._begin_fetch(partial(native.operators().copy_heads, *args), heads.num_bytes)

    def store(self, copies: Copies) -> Transfer:
        """Copy tensors to host memory, and return when the copy is done. A PacedLink returns before that."""
        return self._begin_store(partial(self._copy_all, copies), num_bytes_of(copies))

    def store_rows(self, rows: RowCopies) -> Transfer:
        """Copy one contiguous range of bytes (row) per sequence to host memory, and return when the copy is done. A
        PacedLink returns before that."""
        args = rows.there_B, rows.home_B, rows.row_bytes
        return self._begin_store(partial(native.operators().copy_rows, *args), rows.num_bytes)

    def rest(self) -> None:
        """Wait for the requested copies, and end the threads that copy. Later copies start the threads again."""
        with self._starting:
            threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.shutdown()

    def _copy_all(self, copies: Copies) -> None:
        for to, source in copies:
            self._copy(to, source)

    def _begin_fetch(self, work: Callable[[], None], num_bytes: int) -> Transfer:
        return Running(self._submit("kv-fetch", partial(self._fetch, work, num_bytes)))

    def _begin_store(self, work: Callable[[], None], num_bytes: int) -> Transfer:
        self._store(work, num_bytes)
        return DoneTransfer()

    def _submit(self, name: str, run: Callable[[], None]) -> "Future[None]":
        with self._starting:
            if name not in self._threads:
                self._threads[name] = ThreadPoolExecutor(1, thread_name_prefix=name)
            return self._threads[name].submit(run)

    def _fetch(self, work: Callable[[], None], num_bytes: int) -> None:
        work()
        self._num_bytes_fetched += num_bytes

    def _store(self, work: Callable[[], None], num_bytes: int) -> None:
        work()
        self._num_bytes_stored += num_bytes


@dataclass(frozen=True)
class LinkRate:
    """Rate and latency of an emulated link. If the rate is infinite, copies take as long as the host needs."""

    bytes_per_s: float = float("inf")
    """Bytes per second in each direction. Both directions work at the same time."""
    latency_s: float = 0.0
    """Seconds from the start of a transfer until its first byte arrives."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigError(f"a link of {self.bytes_per_s} bytes a second brings nothing: use a rate above 0")
        if not 0 <= self.latency_s < float("inf"):
            raise ConfigError(f"a latency of {self.latency_s} s is out of range: use 0 or more seconds")


UNBOUND = LinkRate()
"""Rate of a link that is not emulated: copies take only as long as the host needs for them."""


class _Pace:
    """Timer for one direction of an emulated link. Transfers run one after another, and no transfer ends sooner than
    the link's rate allows."""

    def __init__(self, rate: LinkRate) -> None:
        self._rate = rate
        self._free_s = 0.0
        """Time, by time.monotonic, at which all transfers so far have ended on the emulated link."""

    def keep(self, began_s: float, num_bytes: int) -> None:
        """Sleep until a transfer of `num_bytes` would end on the emulated link. `began_s` is the time at which its copy
        began, by time.monotonic. On the emulated link, the transfer starts at this time, or when the previous transfer
        ends if that is later."""
        took_s = self._rate.latency_s + num_bytes / self._rate.bytes_per_s
        self._free_s = max(self._free_s, began_s) + took_s
        left_s = self._free_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)  # noqa: TID251 - the time that the emulated link takes


class PacedLink(ThreadLink):
    """Link that emulates a given rate. It really copies the bytes, and each transfer takes at least as long as the rate
    requires. Each direction has its own thread, so both work at the same time."""

    def __init__(self, rate: LinkRate, copy: CopyTensor = copy_bytes) -> None:
        super().__init__(copy)
        self._in, self._out = _Pace(rate), _Pace(rate)

    def _begin_store(self, work: Callable[[], None], num_bytes: int) -> Transfer:
        return Running(self._submit("kv-store", partial(self._store, work, num_bytes)))

    def _fetch(self, work: Callable[[], None], num_bytes: int) -> None:
        began_s = time.monotonic()
        super()._fetch(work, num_bytes)
        self._in.keep(began_s, num_bytes)

    def _store(self, work: Callable[[], None], num_bytes: int) -> None:
        began_s = time.monotonic()
        super()._store(work, num_bytes)
        self._out.keep(began_s, num_bytes)


class LinkAccess:
    """Access of the host to a device's memory. Implements HostAccess: `read` and `write` copy bytes over the device's
    link. On the host side the bytes pass through memory that the link can access directly, such as pinned memory."""

    def __init__(
        self,
        link: Link,
        make_home: Callable[[int], Tensor],
        num_frames: int = NUM_FRAMES,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        """Create the access. Bytes are copied over `link`. `make_home(num_bytes)` allocates host memory (uint8) that
        the link can access fast. `num_frames` and `frame_bytes` are the number and the size of the staging frames."""
        self._link = link
        self._make_home = make_home
        self._frame_size = num_frames, frame_bytes

    @classmethod
    def plain(cls, link: Link, num_frames: int = NUM_FRAMES, frame_bytes: int = FRAME_BYTES) -> Self:
        """Return a LinkAccess that copies through host memory that is not pinned."""
        return cls(link, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), num_frames, frame_bytes)

    @cached_property
    def frames(self) -> StagingFrames:
        """Return the device's staging frames (preallocated buffers in host memory). They are allocated at the first
        access. Only the residency policy that stores KV on the device accesses them."""
        return StagingFrames(self._make_home, *self._frame_size)

    def read(self, sources: Sequence[Tensor]) -> memoryview:
        """Return a copy of device tensors in host memory. All sources are copied in one transfer."""
        staged = self._make_home(sum(source.nbytes for source in sources))
        copies, start = list[tuple[Tensor, Tensor]](), 0
        for source in sources:
            copies.append((_like(source, staged[start : start + source.nbytes]), source))
            start += source.nbytes
        self._link.store(copies).result()
        return bytes_of(staged)

    def queued(self) -> Transfer:
        """Return the work that this thread has queued on the device so far, as a transfer that ends with it."""
        return self._link.queued()

    def write(self, writes: Writes, *, after: Transfer | None) -> Transfer:
        """Start to copy bytes to the device, all by one call of the link. Bytes that are in staging frames
        (preallocated buffers in host memory) are copied directly. Other bytes are first copied to host memory that the
        link can access directly. `after`: see Link.fetch."""
        copies = list[tuple[Tensor, Tensor]]()
        for targets, data in writes:
            first = targets[0]
            source = self._staged(data).view(first.dtype).view(-1, *first.shape[1:])
            copies += zip(targets, source.split_with_sizes([len(to) for to in targets]), strict=True)
        return self._link.fetch(copies, after=after)

    def _staged(self, data: memoryview) -> Tensor:
        """Return the bytes of `data` in memory that the link copies from."""
        framed = self.frames.tensor_of(data)
        if framed is not None:
            return framed
        staged = self._make_home(data.nbytes)
        np.copyto(np.asarray(bytes_of(staged)), np.frombuffer(data, np.uint8))
        return staged


def _like(tensor: Tensor, staged: Tensor) -> Tensor:
    """Return the bytes in `staged` as a tensor with the shape and dtype of `tensor`."""
    return staged.view(tensor.dtype).view(tensor.shape)
