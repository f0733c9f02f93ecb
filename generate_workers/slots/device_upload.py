"""Copies pushed KV from staging frames to a device with its own memory, on a separate thread.

`slots.slot_access.FrameWriter` copies pieces into frames, on the loop or on a loader's thread, and queues them for the
upload's thread. The SlotTable is notified when a piece is on the device. So neither the loop nor a holder of the
table's lock waits for a link. The thread begins all queued copies before it waits for the oldest copy to end, so that
the link always has a next copy. If the residency policy has frames (`residency.port`), only this thread writes pushed
KV. It also does the rest of a write, such as packing KV in 4 bits.
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
    """KV of tokens in one layer, held in a frame until it is copied to its claim's slot."""

    claim: SlotClaim
    layer: int
    tokens: TokenRange
    frame: Frame
    num_bytes: int
    """Bytes of the KV, from the beginning of the frame."""
    landed: "Future[str]" = field(default_factory=Future)
    """Future that is done when the copy has ended. Its result is the text of the copy's error, or empty. The exception
    itself is not stored, because its traceback would keep memory of the writer alive."""


class DeviceUpload:
    """Copies pieces from frames to the slots of one group. Thread-safe."""

    def __init__(self, frames: StagingFrames, row_bytes: int, on_landed: Callable[[FramedPiece, str], None]) -> None:
        """`row_bytes`: bytes of one token's KV in one layer. `on_landed` is called on the upload's thread with each
        copied piece and the text of its error, after its frame was released and before `piece.landed` is done. It must
        not raise. Raises ConfigError if a frame is too small for one token."""
        self.frames = frames
        self.frame_tokens = frames.frame_bytes // row_bytes
        """Number of tokens that a frame holds."""
        if not self.frame_tokens:
            raise ConfigError(
                f"KV of one token and layer takes {row_bytes} bytes, and a staging frame has {frames.frame_bytes}: "
                "use device = cpu"
            )
        self._on_landed = on_landed
        self._coming = SimpleQueue[FramedPiece | None]()
        """Pieces to be copied, at most one for each frame; None ends the thread."""
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    async def take(self, count: int) -> list[Frame]:
        """Return `count` frames. Waits while too few frames are free, first come, first served. A cancelled call gets
        no frames."""
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
        """Copy a piece to its slot and then release its frame. Any thread; does not wait for the copy."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-upload", daemon=True)
                self._thread.start()
            self._coming.put(piece)

    def rest(self) -> None:
        """Wait until all pieces passed to `bring` are copied, and end the thread. A later piece starts a new thread.
        Idempotent."""
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
