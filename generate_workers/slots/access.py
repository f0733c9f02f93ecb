"""The users inside a slot: writers of pushed KV, and readers that copy a row's KV away.

`transport.kv_receiver` and `prefixes.loading` write, `prefixes.answer_saving` reads. A slot is not claimed anew before
its last writer and reader have left, nor while a piece is on its way to it (`slots.landing`), so memory that is being
copied never changes its owner meanwhile. `SlotTable` makes writers and readers; its lock guards their count.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from baton.errors import InvalidArgumentError, TransferError
from baton.types import LeaseRef, TokenRange
from generate_workers.residency.port import SharesPrefixes
from generate_workers.slots.landing import FramedPiece, Landing
from generate_workers.slots.leases import Claim
from modeling.kv.staging import Frame
from transport.kv_sink import PushTarget


class SlotWriter(PushTarget, Protocol):
    """One writer inside a lease, from `SlotTable.open_push`: a transport.kv_sink.PushTarget on the loop, and what other
    threads use in its place. Valid only inside `open_push`."""

    def copy_in(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Take tokens over as PushTarget.write does, in one piece or several. Any thread but the loop's, which it may
        hold up."""
        ...

    def drain(self) -> None:
        """Wait as PushTarget.settle does. Any thread but the loop's."""
        ...


@dataclass(frozen=True)
class HomeWriter:
    """A SlotWriter of rows whose KV is written in place. Nothing of it waits."""

    claim: Claim
    put: Callable[[Claim, int, TokenRange, memoryview], bool]
    """Copies a piece into place."""

    async def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copy a piece into place."""
        return self.put(self.claim, layer, tokens, data)

    async def settle(self) -> None:
        """Return at once: all is in place."""

    def copy_in(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copy a piece into place."""
        return self.put(self.claim, layer, tokens, data)

    def drain(self) -> None:
        """Return at once: all is in place."""


class FrameWriter:
    """A SlotWriter of rows on a device with memory of its own: pieces wait for a frame, and go on from there by the
    landing's thread."""

    def __init__(
        self, claim: Claim, landing: Landing, expect: Callable[[Claim, int, TokenRange, Sequence[TokenRange]], bool]
    ) -> None:
        """`expect`: notes a piece as present, and its parts as on their way; returns False for a piece that was noted
        before, and raises as PushTarget.write does."""
        self._claim = claim
        self._landing = landing
        self._expect = expect
        self._landed: list[Future[str]] = []
        """Those of pieces on their way, and of some that have landed since."""

    async def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Put a piece into frames, and hand it over. Raises InvalidArgumentError for one that needs too many frames."""
        num_frames, most = -(-len(tokens) // self._landing.frame_tokens), self._landing.frames.num_frames
        if num_frames > most:
            raise InvalidArgumentError(
                f"a piece of {len(tokens)} tokens is out of range: this device takes "
                f"{most * self._landing.frame_tokens} at a time, push smaller pieces"
            )
        return self._bring(layer, tokens, data, await self._landing.take(max(num_frames, 1)))

    async def settle(self) -> None:
        """Wait for the copies."""
        if self._landed:  # `asyncio.wait` cancels no future, so that telling of a landed piece cannot fail
            await asyncio.wait([asyncio.wrap_future(landed) for landed in self._landed])
        self._check()

    def copy_in(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Put tokens into frames, as pieces of one frame each, and hand them over."""
        row_bytes, is_new = data.nbytes // len(tokens), True
        for part in tokens.split(self._landing.frame_tokens):
            start = (part.start - tokens.start) * row_bytes
            frames = self._landing.frames.take(1).result()
            is_new &= self._bring(layer, part, data[start : start + len(part) * row_bytes], frames)
        return is_new

    def drain(self) -> None:
        """Wait for the copies."""
        wait(self._landed)
        self._check()

    def _bring(self, layer: int, tokens: TokenRange, data: memoryview, frames: list[Frame]) -> bool:
        """Hand over a piece in these frames, each as full as it can be, or give them back."""
        parts = tokens.split(self._landing.frame_tokens)
        is_new = False
        try:
            self._check()
            is_new = self._expect(self._claim, layer, tokens, parts)
        finally:
            if not is_new:
                self._landing.frames.give(frames)
        start = 0
        for part, frame in zip(parts, frames, strict=True) if is_new else ():
            num_bytes = data.nbytes * len(part) // len(tokens)
            np.copyto(np.frombuffer(frame, np.uint8)[:num_bytes], np.frombuffer(data, np.uint8)[start:][:num_bytes])
            piece = FramedPiece(self._claim, layer, part, frame, num_bytes)
            self._landed.append(piece.landed)
            self._landing.bring(piece)
            start += num_bytes
        return is_new

    def _check(self) -> None:
        """Raise the error of a piece that has landed badly; forget those that have landed."""
        landed = [each for each in self._landed if each.done()]
        self._landed = [each for each in self._landed if not each.done()]
        for each in landed:
            if failure := each.result():
                raise TransferError(failure)


class SlotReader:
    """One reader inside an active slot, from `SlotTable.open_read` to `close`. Any thread may use it, one at a time."""

    def __init__(self, claim: Claim, check: Callable[[LeaseRef], object], leave: Callable[[Claim], None]) -> None:
        self._claim = claim
        self._check = check
        self._leave = leave
        self._is_inside = True

    def check(self) -> None:
        """Raise StaleStampError when the row has been released, so that its KV is of no more use."""
        self._check(self._claim.ref)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the KV of `tokens`, which no writer may change any more. The view is valid until `close`. Raises
        StaleStampError when the row has been released."""
        assert self._is_inside
        self.check()
        return self._claim.memory.row.export(layer, tokens)

    def keep_prefix(self, names: Sequence[str], block_tokens: int) -> None:
        """Leave the row's first blocks to rows that begin alike, if the policy shares any. Raises StaleStampError when
        the row has been released."""
        assert self._is_inside
        self.check()
        if isinstance(self._claim.memory.row, SharesPrefixes):
            self._claim.memory.row.keep(names, block_tokens)

    def close(self) -> None:
        """Leave the slot; a slot that was released meanwhile becomes free now. Idempotent."""
        if self._is_inside:
            self._is_inside = False
            self._leave(self._claim)
