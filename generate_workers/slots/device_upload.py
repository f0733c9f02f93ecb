"""Copies pushed KV from staging frames (buffers in host memory) to a device with its own memory, on a separate thread.

`slots.slot_access.FrameWriter` copies pieces of KV into frames, on the asyncio loop or on a loader's thread, and queues
the frames for the upload thread. The SlotTable is notified when a piece is on the device. Neither the event loop nor a
thread that holds the table's lock waits for a copy to the device. The upload thread begins all queued copies before it
waits for the oldest one to end, so that the link is never idle while copies are queued. Queued pieces of one lease are
copied to pages together, by one call of the link. If the residency policy has frames (`residency.port`), only this
thread writes pushed KV. It also does the other work of a write, such as packing KV in 4 bits.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from baton.errors import ConfigError
from baton.modeling.kv.staging import Frame, StagingFrames
from baton.modeling.kv.transfers import Transfer
from baton.types import SlotId, TokenRange
from generate_workers.residency.paged import PagedRow
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


OnLanded = Callable[[Sequence[FramedPiece], str], None]
"""Function that the upload thread calls after each copy, with the pieces of one lease that were copied together, and
the text of the copy's error (empty: no error). At the time of the call, the frames are free again, and the futures
`FramedPiece.landed` are not done yet. The function must not raise."""


class DeviceUpload:
    """Copies pieces of KV from staging frames to the slots of one group. Thread-safe."""

    def __init__(self, frames: StagingFrames, row_bytes: int, on_landed: OnLanded) -> None:
        """`row_bytes`: number of bytes of one token's KV in one layer. Raises ConfigError if a frame is too small for
        one token."""
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
        begun = deque[tuple[list[FramedPiece], Transfer]]()
        is_open = True
        while is_open:
            if begun and self._coming.empty():  # only this thread reads the queue
                self._end(*begun.popleft())
                continue
            came, is_open = self._queued()
            for pieces in _together(came):
                try:
                    begun.append((pieces, _begin(pieces)))
                except Exception as error:
                    logger.exception(failure := _failure(pieces, error))
                    self._land(pieces, failure)
        for each in begun:
            self._end(*each)

    def _queued(self) -> tuple[list[FramedPiece], bool]:
        """Wait for a piece, and return all queued pieces. The second result is False if the thread must end."""
        came = list[FramedPiece]()
        while (piece := self._coming.get()) is not None:
            came.append(piece)
            if self._coming.empty():
                return came, True
        return came, False

    def _end(self, pieces: list[FramedPiece], copying: Transfer) -> None:
        copying.wait()
        failure = ""
        try:
            copying.result()
        except Exception as error:
            logger.exception(failure := _failure(pieces, error))
        self._land(pieces, failure)

    def _land(self, pieces: list[FramedPiece], failure: str) -> None:
        self.frames.give([piece.frame for piece in pieces])
        self._on_landed(pieces, failure)
        for piece in pieces:
            piece.landed.set_result(failure)


def _together(pieces: Sequence[FramedPiece]) -> Iterator[list[FramedPiece]]:
    """Yield lists of pieces that are copied together: those of one lease, so that no copy that fails ends another
    lease. Only slots in pages can take several pieces at once."""
    of_slots: dict[SlotId, list[FramedPiece]] = {}
    for piece in pieces:
        if isinstance(piece.claim.memory.row, PagedRow):
            of_slots.setdefault(piece.claim.ref.slot, []).append(piece)
        else:
            yield [piece]
    yield from of_slots.values()


def _begin(pieces: Sequence[FramedPiece]) -> Transfer:
    """Begin to copy pieces of one lease to its slot. If this raises, no copy has begun."""
    contents = [(piece.layer, piece.tokens, piece.frame[: piece.num_bytes]) for piece in pieces]
    row = pieces[0].claim.memory.row
    if isinstance(row, PagedRow):
        return row.write_all(contents)
    (content,) = contents
    return row.write(*content)


def _failure(pieces: Sequence[FramedPiece], error: Exception) -> str:
    """Return the text of the error of a copy. It names the first of the pieces that were copied together."""
    piece = pieces[0]
    where = f"layer {piece.layer}, tokens [{piece.tokens.start}, {piece.tokens.end}) of slot {piece.claim.ref.slot}"
    return f"{where} could not be copied to the device ({error!r}): the lease has ended, reserve a slot again"
