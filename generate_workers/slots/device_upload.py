"""Copies pushed KV from staging frames (buffers in host memory) to a device with its own memory, on a separate thread.

`slots.slot_access.FrameWriter` copies pieces of KV into frames, on the asyncio loop or on a loader's thread, and queues
the frames for the upload thread. The SlotTable is notified when a piece is on the device. Neither the event loop nor a
thread that holds the table's lock waits for a copy to the device. The upload thread begins all queued copies before it
waits for the oldest one to end, so that the link is never idle while copies are queued. If the residency policy has
frames (`residency.port`), only this thread writes pushed KV. It also does the other work of a write, such as packing KV
in 4 bits.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from baton.errors import ConfigError
from baton.modeling.kv.staging import Frame, StagingFrames
from baton.modeling.kv.transfers import Transfer
from baton.types import TokenRange
from generate_workers.slots.leases import SlotClaim

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FramedPiece:
    """Piece of pushed KV: some tokens in one layer, stored in a staging frame until the copy to the slot has ended."""

    claim: SlotClaim
    layer: int
    tokens: TokenRange
    frame: Frame
    num_bytes: int
    """Number of bytes of the KV. The KV starts at the beginning of the frame."""
    landed: "Future[str]" = field(default_factory=Future)
    """Future that is done when the copy to the device has ended. Its result is the text of the copy's error; empty
    if the copy succeeded. The exception object is not stored, because its traceback would keep the writer's memory
    alive."""


class DeviceUpload:
    """Copies pieces of KV from staging frames to the slots of one group. Thread-safe."""

    def __init__(self, frames: StagingFrames, row_bytes: int, on_landed: Callable[[FramedPiece, str], None]) -> None:
        """`row_bytes`: number of bytes of one token's KV in one layer. `on_landed`: function that is called on the
        upload thread after each copy, with the piece and the text of the copy's error (empty: no error). At the time of
        the call, the frame is free again, and the future `piece.landed` is not done yet. The function must not raise.
        Raises ConfigError if a frame is too small for one token."""
        self.frames = frames
        self.frame_tokens = frames.frame_bytes // row_bytes
        """Number of tokens whose KV of one layer fits into a frame."""
        if not self.frame_tokens:
            raise ConfigError(
                f"KV of one token and layer takes {row_bytes} bytes, and a staging frame has {frames.frame_bytes}: "
                "use device = cpu"
            )
        self._on_landed = on_landed
        self._coming = SimpleQueue[FramedPiece | None]()
        """Queue of pieces to be copied; each piece is in a frame of its own. The upload thread ends when it reads
        None."""
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    async def take(self, count: int) -> list[Frame]:
        """Wait until `count` frames are free, and return them. Callers are served in the order of their calls. A
        cancelled call gets no frames."""
        asked = self.frames.take(count)
        if not asked.done():
            try:  # `asyncio.wait` cancels no future, so that no frame is granted to a cancelled wait
                await asyncio.wait([asyncio.wrap_future(asked)])
            except BaseException:
                if not asked.cancel():
                    self.frames.give(asked.result())
                raise
        return asked.result()

    def bring(self, piece: FramedPiece) -> None:
        """Queue a piece for the upload thread, which copies it to the slot of its claim. The piece's frame is released
        after the copy. Returns without waiting for the copy. May be called on any thread."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-upload", daemon=True)
                self._thread.start()
            self._coming.put(piece)

    def rest(self) -> None:
        """Wait until all queued pieces have been copied, and stop the upload thread. A later call of `bring` starts a
        new thread. Idempotent."""
        with self._starting:  # at most one thread runs at a time
            thread, self._thread = self._thread, None
            if thread is not None:
                self._coming.put(None)
                thread.join()

    def _run(self) -> None:
        begun = deque[tuple[FramedPiece, Transfer]]()
        while True:
            if begun and self._coming.empty():  # only this thread reads the queue
                self._end(*begun.popleft())
            elif (piece := self._coming.get()) is not None:
                try:
                    copying = piece.claim.memory.row.write(piece.layer, piece.tokens, piece.frame[: piece.num_bytes])
                except Exception as error:
                    logger.exception(failure := _failure(piece, error))
                    self._land(piece, failure)
                else:
                    begun.append((piece, copying))
            else:
                break
        for each in begun:
            self._end(*each)

    def _end(self, piece: FramedPiece, copying: Transfer) -> None:
        copying.wait()
        failure = ""
        try:
            copying.result()
        except Exception as error:
            logger.exception(failure := _failure(piece, error))
        self._land(piece, failure)

    def _land(self, piece: FramedPiece, failure: str) -> None:
        self.frames.give([piece.frame])
        self._on_landed(piece, failure)
        piece.landed.set_result(failure)


def _failure(piece: FramedPiece, error: Exception) -> str:
    where = f"layer {piece.layer}, tokens [{piece.tokens.start}, {piece.tokens.end}) of slot {piece.claim.ref.slot}"
    return f"{where} could not be copied to the device ({error!r}): the lease has ended, reserve a slot again"
