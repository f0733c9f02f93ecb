"""Staging frames: bounded host memory through which pushed KV reaches a device with memory of its own.

A link copies fast only from memory that it can read directly, which is pinned memory on CUDA, and pinning takes longer
than copying. So a device has a fixed number of frames, which are allocated once. A writer of pushed KV claims a frame
and fills it. The frame is released when the link has read it. While all frames are in use, writers wait. This limits
the KV that has arrived but is not on the device yet. `generate_workers.slots` takes and releases frames, and
`baton.modeling.device.copying.LinkAccess` copies from them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from torch import Tensor

NUM_FRAMES = 16
FRAME_BYTES = 1 << 20
"""Number of bytes of a frame. A piece of a push fills at most one frame (`baton.transport.kv_routes.MAX_PIECE_BYTES`),
unless a third-party sender makes larger pieces."""

Frame = memoryview
"""All bytes of one frame."""


class StagingFrames:
    """Frames of equal size in one block of host memory. The frame that was released last is reused first: it is likely
    to be in a CPU cache, and frames that are never needed are never written. Thread-safe."""

    def __init__(
        self, make_home: Callable[[int], Tensor], num_frames: int = NUM_FRAMES, frame_bytes: int = FRAME_BYTES
    ) -> None:
        """`make_home(num_bytes)` allocates host memory (uint8) from which the link copies. Its errors are raised."""
        self.num_frames, self.frame_bytes = num_frames, frame_bytes
        self._memory_B = make_home(num_frames * frame_bytes)
        data = self._memory_B.numpy().data
        starts = range(0, num_frames * frame_bytes, frame_bytes)
        self._lock = threading.Lock()
        self._free = [data[start : start + frame_bytes] for start in reversed(starts)]
        self._waiting: deque[tuple[int, Future[list[Frame]]]] = deque()
        """Waiting calls in order: the number of frames and the future of each call. Empty unless the first call needs
        more frames than are free."""

    @property
    def num_free(self) -> int:
        """Return the number of free frames."""
        return len(self._free)

    def take(self, count: int) -> "Future[list[Frame]]":
        """Return a future of `count` frames, at most `num_frames`. It is done immediately if enough frames are free and
        no earlier call waits. The caller must release the frames with `give`. A future that is cancelled before it is
        done does not claim frames."""
        assert 0 < count <= self.num_frames, f"{count} of {self.num_frames} frames"
        asked: Future[list[Frame]] = Future()
        with self._lock:
            self._waiting.append((count, asked))
        self._grant()
        return asked

    def give(self, frames: Sequence[Frame]) -> None:
        """Release frames that the link does not read any more."""
        with self._lock:
            self._free.extend(frames)
        self._grant()

    def tensor_of(self, data: memoryview) -> Tensor | None:
        """Return `data` as a tensor that is part of the frames' memory, uint8. None: `data` is in other memory."""
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
