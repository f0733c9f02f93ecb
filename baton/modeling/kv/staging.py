"""Staging frames: a fixed amount of host memory through which KV from other workers reaches the memory of a device.

A link copies fast only from memory that it can read directly. On CUDA this is pinned memory, and pinning takes longer
than copying. A device therefore has a fixed number of frames, which are allocated once.

A writer of received KV claims a frame and fills it. The frame is released after the link has read it. While all frames
are in use, writers wait. This limits the amount of KV that has arrived but is not on the device yet.
`generate_workers.slots` claims and releases frames, and `baton.modeling.device.copying.LinkAccess` copies from them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from torch import Tensor

NUM_FRAMES = 16
FRAME_BYTES = 1 << 20
"""Number of bytes of a staging frame (preallocated buffer in host memory). KV is transferred in pieces. Each piece fits
into one frame (`baton.transport.kv_routes.MAX_PIECE_BYTES`), unless a third-party sender creates larger pieces."""

Frame = memoryview
"""Writable view of all bytes of one staging frame (preallocated buffer in host memory)."""


class StagingFrames:
    """Pool of staging frames: buffers of equal size in one block of host memory. The most recently released frame is
    reused first, because it is likely to be in a CPU cache. If at most n frames are in use at any time, only the same n
    frames are ever written. Thread-safe."""

    def __init__(
        self, make_home: Callable[[int], Tensor], num_frames: int = NUM_FRAMES, frame_bytes: int = FRAME_BYTES
    ) -> None:
        """Allocate the frames. `make_home(num_bytes)` allocates host memory (uint8) that the link can read directly.
        Errors of `make_home` are raised."""
        self.num_frames, self.frame_bytes = num_frames, frame_bytes
        self._memory_B = make_home(num_frames * frame_bytes)
        data = self._memory_B.numpy().data
        starts = range(0, num_frames * frame_bytes, frame_bytes)
        self._lock = threading.Lock()
        self._free = [data[start : start + frame_bytes] for start in reversed(starts)]
        self._waiting: deque[tuple[int, Future[list[Frame]]]] = deque()
        """Calls of `take` that wait, in order: the number of frames and the future of each call."""

    @property
    def num_free(self) -> int:
        """Return the number of free frames."""
        return len(self._free)

    def take(self, count: int) -> "Future[list[Frame]]":
        """Claim `count` frames, at most `num_frames`, and return a future of them. The future is done immediately if
        enough frames are free and no earlier call is waiting. The caller must release the frames with `give`. A future
        that is cancelled before it is done claims no frames."""
        assert 0 < count <= self.num_frames, f"{count} of {self.num_frames} frames"
        asked: Future[list[Frame]] = Future()
        with self._lock:
            self._waiting.append((count, asked))
        self._grant()
        return asked

    def give(self, frames: Sequence[Frame]) -> None:
        """Release frames. The link must have finished reading them."""
        with self._lock:
            self._free.extend(frames)
        self._grant()

    def tensor_of(self, data: memoryview) -> Tensor | None:
        """Return `data` as a uint8 tensor that shares the memory of the frames. None: `data` is not in a frame."""
        start = np.frombuffer(data, np.uint8).ctypes.data - self._memory_B.data_ptr()
        return self._memory_B[start : start + data.nbytes] if 0 <= start < len(self._memory_B) else None

    def _grant(self) -> None:
        """Give free frames to the waiting calls, in order. Their futures are set after the lock was released."""
        granted = list[tuple[Future[list[Frame]], list[Frame]]]()
        with self._lock:
            while self._waiting and self._waiting[0][0] <= len(self._free):
                count, asked = self._waiting.popleft()
                if asked.set_running_or_notify_cancel():
                    granted.append((asked, [self._free.pop() for _ in range(count)]))
        for asked, frames in granted:
            asked.set_result(frames)
