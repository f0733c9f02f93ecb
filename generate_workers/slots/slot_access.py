"""Access to a slot's memory: writers of pushed KV, and readers that export a sequence's KV.

`baton.transport.kv_receiver` and `prefixes.loading` write. `prefixes.answer_saving` reads. A slot is not claimed again
until its last writer and reader have ended, and all pieces that are being copied to the slot (`slots.device_upload`)
have arrived. Memory therefore never gets a new owner while it is being copied. `SlotTable` makes the writers and
readers, and counts them under its lock.
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
    """Writer of pushed KV to a leased slot, yielded by `SlotTable.open_push`. On the event loop, `write` and `settle`
    are used. On other threads, `copy_in` and `drain` are used. Valid only until the context of `open_push` ends."""

    def copy_in(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Accept a piece of KV: the KV of `tokens` in one layer. Return False if it was accepted before. This is the
        blocking form of PushTarget.write. May be called on any thread except the event loop's."""
        ...

    def drain(self) -> None:
        """Block until all accepted pieces of KV are in the slot's memory. This is the blocking form of
        PushTarget.settle. May be called on any thread except the event loop's."""
        ...


@dataclass(frozen=True)
class HomeWriter:
    """SlotWriter that writes KV directly to the slot's memory. None of its methods waits."""

    claim: SlotClaim
    put: Callable[[SlotClaim, int, TokenRange, memoryview], bool]
    """Function that copies a piece of KV, given as (claim, layer, tokens, data), to the slot's memory. Returns False
    for a piece that was received before."""

    async def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copy a piece of KV to the slot's memory. Return False for a piece that was received before."""
        return self.put(self.claim, layer, tokens, data)

    async def settle(self) -> None:
        """Return at once: nothing is pending, because `write` and `copy_in` complete the copy before they return."""

    def copy_in(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copy a piece of KV to the slot's memory. Return False for a piece that was received before."""
        return self.put(self.claim, layer, tokens, data)

    def drain(self) -> None:
        """Return at once: nothing is pending, because `write` and `copy_in` complete the copy before they return."""


class FrameWriter:
    """SlotWriter for a device with its own memory. It copies pieces of KV into staging frames (buffers in host memory),
    as soon as frames are free. The upload thread copies the frames to the device."""

    def __init__(
        self,
        claim: SlotClaim,
        upload: DeviceUpload,
        expect: Callable[[SlotClaim, int, TokenRange, Sequence[TokenRange]], bool],
    ) -> None:
        """`expect`: function that records that a piece was received, and that the parts into which it was split are
        being copied. Its arguments are the claim, the layer, the piece's tokens and the parts' tokens. It returns False
        for a piece that was recorded before, and raises the errors of PushTarget.write."""
        self._claim = claim
        self._upload = upload
        self._expect = expect
        self._landed: list[Future[str]] = []
        """Futures of copies to the device whose results have not been checked yet. Some of these copies may have
        ended."""

    async def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copy a piece of KV into staging frames (buffers in host memory), and queue the frames for the upload thread.
        Waits until enough frames are free. Return False if the piece was received before. Raises InvalidArgumentError
        if the piece needs more frames than exist."""
        num_frames, most = -(-len(tokens) // self._upload.frame_tokens), self._upload.frames.num_frames
        if num_frames > most:
            raise InvalidArgumentError(
                f"a piece of {len(tokens)} tokens is out of range: this device takes "
                f"{most * self._upload.frame_tokens} at a time, push smaller pieces"
            )
        return self._bring(layer, tokens, data, await self._upload.take(max(num_frames, 1)))

    async def settle(self) -> None:
        """Wait until all copies to the device have ended. Raises TransferError if a copy failed."""
        if self._landed:  # `asyncio.wait` cancels no future, so that setting `landed` cannot fail
            await asyncio.wait([asyncio.wrap_future(landed) for landed in self._landed])
        self._check()

    def copy_in(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copy the KV of `tokens` into staging frames (buffers in host memory), one frame at a time, and queue the
        frames for the upload thread. Blocks while no frame is free. Return False if any part of this KV was received
        before."""
        row_bytes, is_new = data.nbytes // len(tokens), True
        for part in tokens.split(self._upload.frame_tokens):
            start = (part.start - tokens.start) * row_bytes
            frames = self._upload.frames.take(1).result()
            is_new &= self._bring(layer, part, data[start : start + len(part) * row_bytes], frames)
        return is_new

    def drain(self) -> None:
        """Block until all copies to the device have ended. Raises TransferError if a copy failed."""
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
    """Reader of the KV in an active slot. It is opened by `SlotTable.open_read`, and ends with `close`. May be used on
    any thread, by one thread at a time."""

    def __init__(
        self, claim: SlotClaim, check: Callable[[LeaseRef], object], leave: Callable[[Sequence[SlotClaim]], None]
    ) -> None:
        self._claim = claim
        self._check = check
        self._leave = leave
        self._is_inside = True

    def check(self) -> None:
        """Raise StaleStampError if the slot has been released; its KV must then not be used any more."""
        self._check(self._claim.ref)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the KV of `tokens` in a layer as bytes. No writer may change this KV any more. The view is valid until
        `close`. Raises StaleStampError if the slot has been released."""
        assert self._is_inside
        self.check()
        return self._claim.memory.row.export(layer, tokens)

    def keep_prefix(self, names: Sequence[str], block_tokens: int) -> None:
        """Make the sequence's first blocks available to sequences that have the same prefix, if the policy supports
        sharing. `names`: names of the sequence's first blocks, of `block_tokens` tokens each. Raises StaleStampError if
        the slot has been released."""
        assert self._is_inside
        self.check()
        if isinstance(self._claim.memory.row, PagedRow):
            self._claim.memory.row.keep(names, block_tokens)

    def close(self) -> None:
        """End the use of the slot. If the slot was released meanwhile and this is its last reader or writer, the slot
        becomes free. Idempotent."""
        if self._is_inside:
            self._is_inside = False
            self._leave([self._claim])
