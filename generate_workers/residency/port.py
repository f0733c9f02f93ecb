"""Interface of residency policies. A policy owns the memory for the KV of all slots, and provides the KV to each step,
layer by layer.

`slots` opens, writes and releases the KV of sequences (RowKv). `engine.model_runner` runs steps on the engine's thread.
The interface distinguishes two memories: `device`, from which attention reads, and `home`, in which KV is stored
between steps. Usually `home` is host memory. If a policy stores KV on the device, this KV counts both as `home` and as
`device`. The methods that a policy runs before and after each layer are called its turns. A policy that selects keys
gets the data for its selection in `RowKv.write`, in `begin` and `picks` of its turns, and at the end of a step.
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
"""Maximum number of first keys of a sequence (attention sinks) that drafts attend to, as in MagicDec (Sadhukhan et al.,
2024)."""
StepRows = Sequence[tuple[SlotId, TokenRange]]
"""Slots of one forward pass, each with its new tokens. The KV of all earlier tokens must have been written."""


class RowError(Exception):
    """Error of a step that is caused by the sequence in `slot`. The step can be run again without this sequence."""

    def __init__(self, slot: SlotId, message: str) -> None:
        super().__init__(message)
        self.slot = slot


@dataclass(frozen=True)
class KvBytes:
    """Numbers of bytes of KV in `home`, the memory where KV is stored between steps, and in device memory. KV that is
    stored on the device counts as both."""

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
    """Keys of a sequence that drafts attend to: its first `num_first` keys, and its latest `num_last` keys."""

    num_first: int
    """Number of keys at the start of the sequence."""
    num_last: int
    """Number of latest keys of the sequence, including the keys of drafts."""
    most_drafts: int
    """Maximum number of drafts that a sequence gets before a step verifies them."""

    @property
    def num_places(self) -> int:
        """Return the capacity, in tokens, of the memory for a copy of these keys. The capacity is larger than the
        number of keys. Otherwise the copies of the latest keys would often have to be moved, to free space for new
        keys."""
        return self.num_first + 2 * self.num_last + self.most_drafts

    @classmethod
    def of(cls, num_keys: int, most_drafts: int) -> Self:
        """Return a DraftKeys with `num_keys` keys in total; `num_keys` should be 2 or more. Up to half of them, but at
        most `_NUM_SINKS`, are first keys. All remaining ones are latest keys."""
        num_first = min(_NUM_SINKS, num_keys // 2)
        return cls(num_first, num_keys - num_first, most_drafts)


@dataclass(frozen=True)
class KvShape:
    """Size of the model's KV and of the batch, from which a policy computes how much memory it needs."""

    layout: KvLayout
    windows: Sequence[int | None]
    """Sliding window of each layer in tokens; None: no window."""
    num_slots: int
    max_slot_tokens: int
    draft_keys: DraftKeys | None = None
    """Numbers of first keys and of latest keys that policy `host` copies to the device for drafts. None: no keys are
    copied."""
    chosen_drafts: bool = False
    """True if drafts select keys among all keys of a sequence. Policy `device` then stores the keys of each sequence
    contiguously on every device."""
    most_new_tokens: int = 256
    """Maximum number of prompt tokens that one step prefills."""

    @property
    def long_span_bytes(self) -> int:
        """Return the maximum number of bytes of KV, in one layer, of all new tokens that a step prefills. The bytes of
        each sequence are rounded up to whole pages."""
        return self.most_new_tokens * self.layout.row_bytes + self.num_slots * PAGE_BYTES

    def bytes_read(self, rows: Iterable[TokenRange]) -> int:
        """Return the number of bytes of KV that attention reads in a step, in all layers. `rows` has the new tokens of
        each sequence. A key or value counts once, even if several new tokens of its sequence attend to it."""
        seen = [(tokens.end, len(tokens)) for tokens in rows]
        counts = {window: self.windows.count(window) for window in set(self.windows)}
        num_rows = 0
        for window, num_layers in counts.items():
            num_rows += num_layers * sum(end if window is None else min(end, window + new - 1) for end, new in seen)
        return num_rows * self.layout.row_bytes


class RowKv(Protocol):
    """KV of the sequence that uses a slot. All sequences that use the slot, one after another, use the same object.
    Used by one thread at a time."""

    @property
    def tokens(self) -> TokenRange:
        """Return the range of token positions that the slot's current sequence may use."""
        ...

    @property
    def num_bytes(self) -> KvBytes:
        """Return the number of bytes of memory that are committed now, in whole pages."""
        ...

    @property
    def frames(self) -> StagingFrames | None:
        """Return the staging frames (buffers in host memory) through which pushed KV is copied to the slot. None: KV is
        written directly to its final memory."""
        ...

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the number of bytes of memory that a sequence takes when all of its `num_tokens` tokens are
        written."""
        ...

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence. `num_tokens`: number of tokens that are certain to be written.
        `capacity_tokens`: maximum number of tokens. If this raises, no memory stays allocated."""
        ...

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of another slot's sequence, or share its memory."""
        ...

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for the KV of `tokens`, which a step is about to write."""
        ...

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the SequenceSpan of a step that runs the new tokens `tokens`: the KV that they attend to, and memory
        for their own KV."""
        ...

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy pushed KV to the memory where the policy stores it. `data` has exactly the KV of `tokens` in
        `layer`. If `data` is in a staging frame, the frame must not change before the transfer has ended. Raises
        MemoryError when memory cannot be allocated."""
        ...

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the KV of `tokens` in a layer as bytes. The KV must have been written. The result is a view of the
        stored KV if possible, otherwise a copy."""
        ...

    def release(self) -> None:
        """Release the memory that the slot's sequence has used. The sequence must have ended. Idempotent."""
        ...


class StepKv(Protocol):
    """Sequences of one forward pass: the spans of KV that the decoder attends to, and the policy's turns (methods that
    run between layers)."""

    @property
    def spans(self) -> Sequence[SequenceSpan]:
        """Return a SequenceSpan for each sequence of the step: its new tokens, and the KV that they attend to."""
        ...

    @property
    def num_bytes_read(self) -> int:
        """Return the number of bytes of KV that attention reads in this step, in all layers."""
        ...

    @property
    def turns(self) -> LayerTurns | None:
        """Return the policy's turns: the methods that run before and after each layer. None: the policy does nothing
        between layers, and sequences attend to all keys."""
        ...


class Residency(Protocol):
    """Residency policy for all slots of a group. `open` returns the KV object (RowKv) of a slot. The method `open`, and
    the methods `write` and `release` of a RowKv, may be called on any thread. For the same slot, only one thread at a
    time may call them. If `frames` is not None, a single thread must make all calls of `write`. The methods `copy`,
    `step` and `close` may be called only on the engine's thread."""

    @property
    def traits(self) -> PolicyTraits:
        """Return the properties of the policy that must be known before it is made, such as its name."""
        ...

    @property
    def frames(self) -> StagingFrames | None:
        """Return the staging frames (buffers in host memory) through which pushed KV is copied to a device. None: KV is
        written directly to its final memory."""
        ...

    @property
    def num_link_bytes(self) -> int:
        """Return the number of bytes that steps have copied between host and device so far. On a CPU, nothing is
        copied; there it is the number of bytes that attention has read from `home`, the memory where KV is stored
        between steps."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Return the number of bytes of device memory that the policy uses in addition to the sequences' KV."""
        ...

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the number of bytes of memory that a sequence of `num_tokens` tokens takes."""
        ...

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> RowKv:
        """Begin the use of a slot by a new sequence, and return the slot's KV object. The previous sequence must have
        released the slot. `num_tokens`: number of tokens that are certain to be written. `capacity_tokens`: maximum
        number of tokens."""
        ...

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of a slot's sequence to another slot, which must be empty.
        Memory may be shared instead of copied."""
        ...

    def step(self, rows: StepRows) -> AbstractContextManager[StepKv]:
        """Commit memory for the new tokens, and return a context for one forward pass. After the context has ended, no
        thread uses the sequences' memory any more, even if the forward pass failed. Entering the context raises
        RowError, before any layer runs, if a sequence cannot run in this step."""
        ...

    def close(self) -> None:
        """Stop the policy's threads. Idempotent."""
        ...
