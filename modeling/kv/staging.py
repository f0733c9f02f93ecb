"""Staging frames: bounded home memory through which pushed KV goes to a device with memory of its own.

A link copies fast only from memory that it reaches by itself, pinned on CUDA, and pinning takes longer than copying. So
a device has a fixed number of frames, allocated once. A writer of pushed KV takes a frame and fills it; the frame is
given back when the link has read it. While all frames are taken, writers wait: that is the bound on KV between its
arrival and the device. `generate_workers.slots` takes frames and gives them back; `modeling.device.copying.LinkAccess`
copies from them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from torch import Tensor

NUM_FRAMES = 16
FRAME_BYTES = 1 << 20
"""Bytes of a frame: a piece of a push fills one at most (`transport.kv_routes.MAX_PIECE_BYTES`), unless a sender that
is not ours makes larger pieces."""

Frame = memoryview
"""All bytes of one frame."""


class StagingFrames:
    """Frames of equal size in one piece of home memory. The frame that was given back last is taken first: it is likely
    to be in a cache, and memory that is never used is never touched. Thread-safe."""

    def __init__(
        self, make_home: Callable[[int], Tensor], num_frames: int = NUM_FRAMES, frame_bytes: int = FRAME_BYTES
    ) -> None:
        """`make_home`: makes home memory of so many bytes, uint8, that the link copies from. Raises what it raises."""
        self.num_frames, self.frame_bytes = num_frames, frame_bytes
        self._memory_B = make_home(num_frames * frame_bytes)
        data = self._memory_B.numpy().data
        starts = range(0, num_frames * frame_bytes, frame_bytes)
        self._lock = threading.Lock()
        self._free = [data[start : start + frame_bytes] for start in reversed(starts)]
        self._waiting: deque[tuple[int, Future[list[Frame]]]] = deque()
        """Calls that wait for so many frames, in order; not empty only while there are too few for the first."""

    @property
    def num_free(self) -> int:
        """Return how many frames are not taken."""
        return len(self._free)

    def take(self, count: int) -> "Future[list[Frame]]":
        """Return a future of so many frames, at most `num_frames`: done at once if they are free and no earlier call
        waits. The caller gives them back; a future that is cancelled in time takes none."""
        assert 0 < count <= self.num_frames, f"{count} of {self.num_frames} frames"
        asked: Future[list[Frame]] = Future()
        with self._lock:
            self._waiting.append((count, asked))
        self._grant()
        return asked

    def give(self, frames: Sequence[Frame]) -> None:
        """Give frames back, which the link reads no more."""
        with self._lock:
            self._free.extend(frames)
        self._grant()

    def tensor_of(self, data: memoryview) -> Tensor | None:
        """Return the bytes of `data` as a part of the frames' memory, uint8; None when they are elsewhere."""
        start = np.frombuffer(data, np.uint8).ctypes.data - self._memory_B.data_ptr()
        return self._memory_B[start : start + data.nbytes] if 0 <= start < len(self._memory_B) else None

    def _grant(self) -> None:
        """Hand free frames to the calls that wait, in order. Wakes them without the lock."""
        granted = list[tuple[Future[list[Frame]], list[Frame]]]()
        with self._lock:
            while self._waiting and self._waiting[0][0] <= len(self._free):
                count, asked = self._waiting.popleft()
                if asked.set_running_or_notify_cancel():
                    granted.append((asked, [self._free.pop() for _ in range(count)]))
        for asked, frames in granted:
            asked.set_result(frames)
