"""Access to a slot's memory: writers of pushed KV, and readers that export a sequence's KV.

`baton.transport.kv_receiver` and `prefixes.loading` write, `prefixes.answer_saving` reads. A slot is not claimed again
before its last writer and reader have ended, and the last piece that is being copied to it (`slots.device_upload`) is
in place. So the owner of memory does not change while the memory is being copied. `SlotTable` makes writers and
readers; its lock guards their count.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from baton.errors import InvalidArgumentError, TransferError
from baton.modeling.kv.staging import Frame
from baton.transport.kv_sink import PushTarget
from baton.types import LeaseRef, TokenRange
from generate_workers.residency.paged import PagedRow
from generate_workers.slots.device_upload import DeviceUpload, FramedPiece
from generate_workers.slots.leases import SlotClaim


class SlotWriter(PushTarget, Protocol):
    """Writer to a leased slot, returned by `SlotTable.open_push`. On the asyncio loop it is used as a `PushTarget` of
    the transport; other threads call `copy_in` and `drain`. Valid only in the context of `open_push`."""

    def copy_in(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Accept the KV of `tokens` as PushTarget.write does, in one or more pieces. May block. May be called on any
        thread except the loop's."""
        ...

    def drain(self) -> None:
        """Block until all pieces are in place, as PushTarget.settle does. May be called on any thread except the
        loop's."""
        ...


@dataclass(frozen=True)
class HomeWriter:
    """SlotWriter for KV that is written in place. No method waits."""

    claim: SlotClaim
    put: Callable[[SlotClaim, int, TokenRange, memoryview], bool]
    """Function that copies a piece, given as (claim, layer, tokens, data), into place. Returns False for a piece that
    was received before."""

    async def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copy a piece into place. Return False for a piece that was received before."""
        return self.put(self.claim, layer, tokens, data)

    async def settle(self) -> None:
        """Return at once, since all KV is in place."""

    def copy_in(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copy a piece into place. Return False for a piece that was received before."""
        return self.put(self.claim, layer, tokens, data)

    def drain(self) -> None:
        """Return at once, since all KV is in place."""


class FrameWriter:
    """SlotWriter for a device with its own memory. Pieces are put into staging frames as soon as frames are free; the
    upload's thread copies them from the frames to the device."""

    def __init__(
        self,
        claim: SlotClaim,
        upload: DeviceUpload,
        expect: Callable[[SlotClaim, int, TokenRange, Sequence[TokenRange]], bool],
    ) -> None:
        """`expect` records a piece as received, and its parts as being copied. It returns False for a piece that was
        recorded before, and raises the errors of PushTarget.write."""
        self._claim = claim
        self._upload = upload
        self._expect = expect
        self._landed: list[Future[str]] = []
        """Futures of pieces that are being copied, and of pieces whose copies have ended since the latest check."""

    async def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Put a piece into frames, and queue it for the upload. Waits until enough frames are free. Raises
        InvalidArgumentError if the piece needs more frames than the device has."""
        num_frames, most = -(-len(tokens) // self._upload.frame_tokens), self._upload.frames.num_frames
        if num_frames > most:
            raise InvalidArgumentError(
                f"a piece of {len(tokens)} tokens is out of range: this device takes "
                f"{most * self._upload.frame_tokens} at a time, push smaller pieces"
            )
        return self._bring(layer, tokens, data, await self._upload.take(max(num_frames, 1)))

    async def settle(self) -> None:
        """Wait for all copies to end. Raises TransferError if a copy failed."""
        if self._landed:  # `asyncio.wait` cancels no future, so that setting `landed` cannot fail
            await asyncio.wait([asyncio.wrap_future(landed) for landed in self._landed])
        self._check()

    def copy_in(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Put the KV of `tokens` into frames, as pieces of one frame each, and queue them for the upload. Blocks until
        enough frames are free."""
        row_bytes, is_new = data.nbytes // len(tokens), True
        for part in tokens.split(self._upload.frame_tokens):
            start = (part.start - tokens.start) * row_bytes
            frames = self._upload.frames.take(1).result()
            is_new &= self._bring(layer, part, data[start : start + len(part) * row_bytes], frames)
        return is_new

    def drain(self) -> None:
        """Wait for all copies to end. Raises TransferError if a copy failed."""
        wait(self._landed)
        self._check()

    def _bring(self, layer: int, tokens: TokenRange, data: memoryview, frames: list[Frame]) -> bool:
        """Queue a piece for the upload, in these frames, each filled as far as possible. If the piece was received
        before, release the frames instead."""
        parts = tokens.split(self._upload.frame_tokens)
        is_new = False
        try:
            self._check()
            is_new = self._expect(self._claim, layer, tokens, parts)
        finally:
            if not is_new:
                self._upload.frames.give(frames)
        start = 0
        for part, frame in zip(parts, frames, strict=True) if is_new else ():
            num_bytes = data.nbytes * len(part) // len(tokens)
            np.copyto(np.frombuffer(frame, np.uint8)[:num_bytes], np.frombuffer(data, np.uint8)[start:][:num_bytes])
            piece = FramedPiece(self._claim, layer, part, frame, num_bytes)
            self._landed.append(piece.landed)
            self._upload.bring(piece)
            start += num_bytes
        return is_new

    def _check(self) -> None:
        """Drop the futures of copies that have ended. Raises TransferError if one of these copies failed."""
        landed = [each for each in self._landed if each.done()]
        self._landed = [each for each in self._landed if not each.done()]
        for each in landed:
            if failure := each.result():
                raise TransferError(failure)


class SlotReader:
    """Reader of an active slot, from `SlotTable.open_read` to `close`. May be used on any thread, by one thread at a
    time."""

    def __init__(
        self, claim: SlotClaim, check: Callable[[LeaseRef], object], leave: Callable[[SlotClaim], None]
    ) -> None:
        self._claim = claim
        self._check = check
        self._leave = leave
        self._is_inside = True

    def check(self) -> None:
        """Raise StaleStampError if the slot has been released; its KV must then not be used any more."""
        self._check(self._claim.ref)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of the KV of `tokens` in a layer. No writer may still change this KV. The view is valid
        until `close`. Raises StaleStampError if the slot has been released."""
        assert self._is_inside
        self.check()
        return self._claim.memory.row.export(layer, tokens)

    def keep_prefix(self, names: Sequence[str], block_tokens: int) -> None:
        """Share the sequence's first blocks with sequences that have the same prefix, if the policy supports sharing.
        Raises StaleStampError if the slot has been released."""
        assert self._is_inside
        self.check()
        if isinstance(self._claim.memory.row, PagedRow):
            self._claim.memory.row.keep(names, block_tokens)

    def close(self) -> None:
        """End the use of the slot. If the slot was released meanwhile and this is its last reader or writer, the slot
        becomes free. Idempotent."""
        if self._is_inside:
            self._is_inside = False
            self._leave(self._claim)
