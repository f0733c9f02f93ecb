"""Staging frames: bounded host memory through which pushed KV reaches a device with memory of its own.

A link copies fast only from memory that it can read directly, which is pinned memory on CUDA, and pinning takes longer
than copying. So a device has a fixed number of frames, allocated once. A writer of pushed KV takes a frame and fills
it. The frame is released when the link has read it. While all frames are taken, writers wait, which bounds the KV that
has arrived but is not on the device yet. `generate_workers.slots` takes and releases frames, and
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
"""Bytes of a frame. A piece of a push fills at most one frame (`baton.transport.kv_routes.MAX_PIECE_BYTES`), unless a
third-party sender makes larger pieces."""

Frame = memoryview
"""All bytes of one frame."""


class StagingFrames:
    """Frames of equal size in one piece of host memory. The frame that was released last is taken first: it is likely
    to be in a cache, and frames that are never needed are never touched. Thread-safe."""

    def __init__(
        self, make_home: Callable[[int], Tensor], num_frames: int = NUM_FRAMES, frame_bytes: int = FRAME_BYTES
    ) -> None:
        """`make_home(num_bytes)` allocates host memory, uint8, that the link copies from. Its errors are passed on."""
        self.num_frames, self.frame_bytes = num_frames, frame_bytes
        self._memory_B = make_home(num_frames * frame_bytes)
        data = self._memory_B.numpy().data
        starts = range(0, num_frames * frame_bytes, frame_bytes)
        self._lock = threading.Lock()
        self._free = [data[start : start + frame_bytes] for start in reversed(starts)]
        self._waiting: deque[tuple[int, Future[list[Frame]]]] = deque()
        """Waiting calls, in order: the number of frames and the future of each. Empty unless the first needs more
        frames than are free."""

    @property
    def num_free(self) -> int:
        """Return the number of frames that are not taken."""
        return len(self._free)

    def take(self, count: int) -> "Future[list[Frame]]":
        """Return a future of `count` frames, at most `num_frames`. It is done at once if they are free and no earlier
        call waits. The caller must release them with `give`. A future that is cancelled in time takes none."""
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
        """Return the bytes of `data` as a part of the frames' memory, uint8. None: they are in other memory."""
        start = np.frombuffer(data, np.uint8).ctypes.data - self._memory_B.data_ptr()
        return self._memory_B[start : start + data.nbytes] if 0 <= start < len(self._memory_B) else None

    def _grant(self) -> None:
        """Hand free frames to the waiting calls, in order. Sets their futures without holding the lock."""
        granted = list[tuple[Future[list[Frame]], list[Frame]]]()
        with self._lock:
            while self._waiting and self._waiting[0][0] <= len(self._free):
                count, asked = self._waiting.popleft()
                if asked.set_running_or_notify_cancel():
                    granted.append((asked, [self._free.pop() for _ in range(count)]))
        for asked, frames in granted:
            asked.set_result(frames)
