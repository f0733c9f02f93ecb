"""Residency port: a policy owns the memory of all slots' KV, and provides the KV to each step, layer by layer.

`slots` open, write and release the KV of sequences (RowKv); `engine.model_runner` runs steps on the engine's thread.
The port distinguishes two memories: `device`, where attention reads, and `home`, where KV is stored between steps.
`home` is host memory or, if a policy stores KV on the device, device memory; the bytes then count as both. A policy
that attends to selected keys gets the data for its selection in `RowKv.write`, in `begin` and `picks` of its turns
(calls between layers), and at the end of a step.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self

from baton.modeling.forward.decoder import LayerTurns, SequenceSpan
from baton.modeling.kv.row_memory import PAGE_BYTES
from baton.modeling.kv.staging import StagingFrames
from baton.modeling.kv.transfers import Transfer
from baton.types import KvLayout, SlotId, TokenRange
from generate_workers.residency.traits import PolicyTraits

_NUM_SINKS = 16
"""Number of first keys that drafts attend to, as in MagicDec (Sadhukhan et al., 2024)."""
StepRows = Sequence[tuple[SlotId, TokenRange]]
"""Slots of one forward, each with its new tokens. The KV of all earlier tokens is in place."""


class RowError(Exception):
    """Error of the sequence in `slot` that makes its step fail. The step can run without this sequence."""

    def __init__(self, slot: SlotId, message: str) -> None:
        super().__init__(message)
        self.slot = slot


@dataclass(frozen=True)
class KvBytes:
    """Bytes of KV in `home`, the memory where KV is stored between steps, and in device memory. KV that is stored on
    the device counts as both."""

    home: int = 0
    device: int = 0

    def __add__(self, other: "KvBytes") -> "KvBytes":
        return KvBytes(self.home + other.home, self.device + other.device)

    def __sub__(self, other: "KvBytes") -> "KvBytes":
        return KvBytes(self.home - other.home, self.device - other.device)

    def __mul__(self, count: int) -> "KvBytes":
        return KvBytes(self.home * count, self.device * count)


@dataclass(frozen=True)
class DraftKeys:
    """Numbers of first and latest keys of a sequence that drafts attend to."""

    num_first: int
    """Number of tokens at the sequence's start."""
    num_last: int
    """Number of latest tokens, including drafts."""
    most_drafts: int
    """Maximum number of tokens that drafts add before the step that verifies them."""

    @property
    def num_places(self) -> int:
        """Return the number of tokens for which a copy of these keys has room. It has room for additional latest
        tokens, so that these rarely have to be moved back to the start of their area."""
        return self.num_first + 2 * self.num_last + self.most_drafts

    @classmethod
    def of(cls, num_keys: int, most_drafts: int) -> Self:
        """Return a DraftKeys that divides `num_keys` keys, at least two, into a few first keys and the latest keys."""
        num_first = min(_NUM_SINKS, num_keys // 2)
        return cls(num_first, num_keys - num_first, most_drafts)


@dataclass(frozen=True)
class KvShape:
    """Size of the model's KV and of the batch, for which a policy reserves memory."""

    layout: KvLayout
    windows: Sequence[int | None]
    """Sliding window of each layer in tokens; None: no window."""
    num_slots: int
    max_slot_tokens: int
    draft_keys: DraftKeys | None = None
    """Keys that policy `host` copies to the device for drafts. None: no keys are copied."""
    chosen_drafts: bool = False
    """True if drafts select among all keys of a sequence. Policy `device` then stores a sequence's keys contiguously on
    every device."""
    most_new_tokens: int = 256
    """Maximum number of prompt tokens that one step prefills."""

    @property
    def long_span_bytes(self) -> int:
        """Return the maximum number of bytes that the new tokens of all prefilling spans of a step need in one layer,
        with each span rounded up to whole pages."""
        return self.most_new_tokens * self.layout.row_bytes + self.num_slots * PAGE_BYTES

    def bytes_read(self, rows: Iterable[TokenRange]) -> int:
        """Return the bytes that attention reads in all layers for sequences with these new tokens, each key and value
        once."""
        seen = [(tokens.end, len(tokens)) for tokens in rows]
        counts = {window: self.windows.count(window) for window in set(self.windows)}
        num_rows = 0
        for window, num_layers in counts.items():
            num_rows += num_layers * sum(end if window is None else min(end, window + new - 1) for end, new in seen)
        return num_rows * self.layout.row_bytes


class RowKv(Protocol):
    """KV of one slot's current claim, which is one sequence. A slot reuses the object for all of its claims, one after
    another. Used by one thread at a time."""

    @property
    def tokens(self) -> TokenRange:
        """Return the range of tokens that the claim may hold."""
        ...

    @property
    def num_bytes(self) -> KvBytes:
        """Return the bytes that are committed now, in whole pages."""
        ...

    @property
    def frames(self) -> StagingFrames | None:
        """Return the staging frames through which pushed KV is copied to the slot. None: KV is written in place."""
        ...

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that `num_tokens` tokens take once all are written."""
        ...

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim. `num_tokens`: tokens that are certain to be written. If it raises, no memory is held."""
        ...

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Copy or share the first `num_tokens` tokens of another slot's sequence."""
        ...

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens`, which a step is about to write."""
        ...

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the span of a step whose new tokens are `tokens`."""
        ...

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy pushed KV, exactly the range's bytes, to where the policy stores it. If `data` is in a frame,
        it must not change before the transfer is done. Raises MemoryError when memory cannot be allocated."""
        ...

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of `tokens`, which must have been written. Returns the memory itself if possible, else a
        copy."""
        ...

    def release(self) -> None:
        """Release the memory. The claim must have ended. Idempotent."""
        ...


class StepKv(Protocol):
    """View of the sequences of one forward pass: the spans that the decoder runs, and the policy's turns between
    layers."""

    @property
    def spans(self) -> Sequence[SequenceSpan]:
        """Return one span for each sequence of the step."""
        ...

    @property
    def num_bytes_read(self) -> int:
        """Return the bytes of KV that attention reads, in all layers."""
        ...

    @property
    def turns(self) -> LayerTurns | None:
        """Return the policy's turns between layers. None: the policy does nothing between layers, and sequences attend
        to all keys."""
        ...


class Residency(Protocol):
    """Policy over all slots of a group. Any thread may call `open` and RowKv's `write` and `release`, one thread at a
    time per slot. If `frames` is not None, one thread makes all writes. Only the engine's thread calls `copy`, `step`
    and `close`."""

    @property
    def traits(self) -> PolicyTraits:
        """Return the policy's traits, which include its name."""
        ...

    @property
    def frames(self) -> StagingFrames | None:
        """Return the staging frames through which pushed KV is copied to a device. None: KV is written in place."""
        ...

    @property
    def num_link_bytes(self) -> int:
        """Return the bytes that steps have copied between host and device so far. On a CPU: the bytes that attention
        has read from `home`."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of device memory that the policy holds in addition to the sequences' KV."""
        ...

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that a sequence of `num_tokens` tokens takes."""
        ...

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> RowKv:
        """Begin a claim on a slot whose last claim was released. `num_tokens`: number of tokens that are certain to be
        written."""
        ...

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of a slot's sequence to another slot, which must be empty."""
        ...

    def step(self, rows: StepRows) -> AbstractContextManager[StepKv]:
        """Commit memory for the new tokens, and prepare a forward. After the context has ended, no thread uses the
        sequences' memory any more, even if the forward pass failed. Raises RowError on entering, before any layer
        runs."""
        ...

    def close(self) -> None:
        """End the policy's threads. Idempotent."""
        ...
