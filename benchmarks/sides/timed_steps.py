"""Wrappers that measure the parts of steps on an emulated device (`benchmarks.support.step_parts`).

The wrappers enclose the parts of a step: the residency policy and its hooks (callbacks for each layer), the link, and
the decoder's linear layers and attention. The measured code does not depend on the wrappers. All wrappers are used by
the thread that runs the steps.

The wrapped decoder runs each layer in several calls. Without the wrappers, policy `device` runs all layers in one
native call, which cannot be split into parts. A timed step of `device` therefore takes longer than an untimed one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from baton.modeling.device.copying import LinkAccess, LinkRate, PacedLink
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.device.heads import PickedHeads, RowCopies
from baton.modeling.device.port import Copies, Running
from baton.modeling.forward.decode_rows import DecodeRows
from baton.modeling.forward.decoder import Decoder, LayerTurns, SequenceSpan, Step
from baton.modeling.forward.selection import Picks
from baton.modeling.forward.triton.triton_rows import TritonRows
from baton.modeling.kv.staging import StagingFrames
from baton.modeling.kv.transfers import Transfer
from baton.types import SlotId
from benchmarks.support.step_parts import Part, PartClock
from generate_workers.residency.port import KvBytes, Residency, RowKv, StepKv, StepRows
from generate_workers.residency.traits import PolicyTraits


class TimedDecoder(Decoder):
    """Decoder that measures the time of linear layers, of attention, and of a residency policy's hooks (callbacks for
    each layer)."""

    def __init__(self, decoder: Decoder, device: EmulatedDevice, clock: PartClock) -> None:
        """Create a decoder with the model of `decoder` on `device`. `clock` measures the parts of the decoder's
        steps."""
        super().__init__(decoder.config, decoder.weights, device=device)
        self.fused = None  # one call for all layers has no parts
        self._clock = clock

    def project(self, layer: int, hidden_TD: Tensor, step: Step) -> Tensor:
        """Project queries, keys and values, and measure the time."""
        with self._clock.part(Part.LINEAR):
            return super().project(layer, hidden_TD, step)

    def complete(self, layer: int, hidden_TD: Tensor, attended_TNH: Tensor) -> Tensor:
        """Run the part of a layer after attention (output projection and MLP), and measure the time."""
        with self._clock.part(Part.LINEAR):
            return super().complete(layer, hidden_TD, attended_TNH)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the logits of the hidden states, and measure the time."""
        with self._clock.part(Part.LINEAR):
            return super().logits(hidden_RD)

    def forward(
        self,
        token_ids: Sequence[int] | Tensor,
        spans: Sequence[SequenceSpan],
        turns: LayerTurns | None = None,
        **options: Any,
    ) -> Tensor:
        """Run all layers, and measure the time of `turns`, the residency policy's callbacks for each layer. Return the
        hidden states."""
        timed = None if turns is None else TimedTurns(turns, self._clock)
        return super().forward(token_ids, spans, timed, **options)

    def _attend(
        self,
        layer: int,
        q_TNH: Tensor,
        rows: DecodeRows | TritonRows | None,
        others: Sequence[tuple[SequenceSpan, slice]],
        picks: Picks | None,
    ) -> Tensor:
        with self._clock.part(Part.ATTENTION):
            return super()._attend(layer, q_TNH, rows, others, picks)


class TimedTurns:
    """Wrapper that measures the time of a residency policy's hooks (LayerTurns: callbacks for each layer)."""

    def __init__(self, turns: LayerTurns, clock: PartClock) -> None:
        self._turns, self._clock = turns, clock

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Run the policy's hook before a layer, and measure its time."""
        with self._clock.part(Part.POLICY):
            self._turns.begin(layer, hidden_TD)

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return the keys that the policy selects for a layer's queries, and measure the time. None: all keys are
        used."""
        with self._clock.part(Part.POLICY):
            return self._turns.picks(layer, q_TNH)

    def end(self, layer: int) -> None:
        """Run the policy's hook after a layer, and measure its time."""
        with self._clock.part(Part.POLICY):
            self._turns.end(layer)


class TimedResidency:
    """Wrapper that measures how long a residency policy takes to begin a step and to end it."""

    def __init__(self, residency: Residency, clock: PartClock) -> None:
        self._inner, self._clock = residency, clock

    @property
    def traits(self) -> PolicyTraits:
        """Properties of the wrapped residency policy."""
        return self._inner.traits

    @property
    def frames(self) -> StagingFrames | None:
        """Staging frames (buffers in host memory) through which pushed KV is copied to its slot. None: KV is written
        directly to its final memory."""
        return self._inner.frames

    @property
    def num_link_bytes(self) -> int:
        """Number of bytes that have crossed the link so far."""
        return self._inner.num_link_bytes

    @property
    def scratch_bytes(self) -> int:
        """Number of bytes that the policy uses in addition to the KV of its sequences."""
        return self._inner.scratch_bytes

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the memory in bytes that a sequence of `num_tokens` tokens needs."""
        return self._inner.bytes_for(num_tokens)

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> RowKv:
        """Claim a slot for a sequence of `num_tokens` tokens, with memory for `capacity_tokens` tokens. Return the
        sequence's KV."""
        return self._inner.open(slot, num_tokens, capacity_tokens)

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of a sequence from slot `source` to slot `target`."""
        self._inner.copy(source, target, num_tokens)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[StepKv]:
        """Context manager. Begin a step of the wrapped policy, yield the step's KV, and end the step on exit. Begin and
        end are timed."""
        with ExitStack() as entered:
            with self._clock.part(Part.POLICY):
                step = entered.enter_context(self._inner.step(rows))
            yield step
            with self._clock.part(Part.POLICY):
                entered.close()

    def close(self) -> None:
        """Stop the policy's threads."""
        self._inner.close()


class TimedTransfer:
    """Wrapper that measures how long callers wait for a transfer."""

    def __init__(self, transfer: Transfer, clock: PartClock) -> None:
        self._transfer, self._clock = transfer, clock

    def result(self) -> None:
        """Wait until everything is copied, and measure the time. Raises the transfer's error, if any."""
        with self._clock.part(Part.TRANSFER):
            self._transfer.result()

    def join(self) -> None:
        """Call `join` of the wrapped transfer, and measure the time of the call. After the call, this thread may use
        the copied data."""
        with self._clock.part(Part.TRANSFER):
            self._transfer.join()

    def wait(self) -> None:
        """Wait until the copying has ended, even if it failed, and measure the time."""
        with self._clock.part(Part.TRANSFER):
            self._transfer.wait()


class _Awaited(Running):
    """Handle of a running fetch. The time that callers wait for the fetch is added to `waited_s` of its link."""

    def __init__(self, future: "Future[None]", link: "MeasuredLink") -> None:
        super().__init__(future)
        self._link = link

    def result(self) -> None:
        """Wait until the thread has completed the copy. Raises the error of the copy, if any."""
        began_s = time.monotonic()
        try:
            super().result()
        finally:
            self._link.waited_s += time.monotonic() - began_s

    join = result


class MeasuredLink(PacedLink):
    """A PacedLink that measures how long fetches take, and how long threads wait for them."""

    def __init__(self, rate: LinkRate) -> None:
        super().__init__(rate)
        self.fetch_s = 0.0
        """Total duration of all fetches, in seconds."""
        self.waited_s = 0.0
        """Total time that threads waited for fetches, in seconds."""

    def _begin_fetch(self, work: Callable[[], None], num_bytes: int) -> Transfer:
        return _Awaited(self._submit("kv-fetch", partial(self._fetch, work, num_bytes)), self)

    def _fetch(self, work: Callable[[], None], num_bytes: int) -> None:
        began_s = time.monotonic()
        super()._fetch(work, num_bytes)
        self.fetch_s += time.monotonic() - began_s


class MeasuredDevice(EmulatedDevice):
    """Emulated device whose link is a MeasuredLink, which measures fetches."""

    link: MeasuredLink

    def __init__(self, rate: LinkRate) -> None:
        """Create a device whose link has the given rate."""
        super().__init__(rate)
        self._connect(MeasuredLink(rate))

    def _connect(self, link: MeasuredLink) -> None:
        self.link, self._access = link, LinkAccess.plain(link)


class TimedLink(MeasuredLink):
    """MeasuredLink that measures the time spent waiting for each transfer."""

    def __init__(self, rate: LinkRate, clock: PartClock) -> None:
        super().__init__(rate)
        self._clock = clock

    def fetch(self, copies: Copies, *, after: Transfer | None) -> Transfer:
        """Start copying data to the device. Return the transfer."""
        return TimedTransfer(super().fetch(copies, after=after), self._clock)

    def fetch_heads(self, heads: PickedHeads) -> Transfer:
        """Start copying selected keys and values to the device. Return the transfer."""
        return TimedTransfer(super().fetch_heads(heads), self._clock)

    def store(self, copies: Copies) -> Transfer:
        """Start copying data to host memory. Return the transfer."""
        return TimedTransfer(super().store(copies), self._clock)

    def store_rows(self, rows: RowCopies) -> Transfer:
        """Start copying one contiguous range of bytes of each sequence to host memory. Return the transfer."""
        return TimedTransfer(super().store_rows(rows), self._clock)


class TimedDevice(MeasuredDevice):
    """Emulated device that measures the time spent waiting for its link."""

    def __init__(self, rate: LinkRate, clock: PartClock) -> None:
        """Create a device whose link has the given rate. `clock` measures the time spent waiting for the link."""
        super().__init__(rate)
        self._connect(TimedLink(rate, clock))
