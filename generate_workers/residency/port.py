"""The residency port: a policy owns the memory of all slots' KV, and gives it to each step, layer by layer.

`slots` open, write and release rows; `engine.step_runner` runs steps on the engine's thread. Two memories are told
apart: the *device's*, where attention reads, and *home*, where KV lives between steps. For a policy that keeps all KV
on the device they are one, and its bytes count as both. A policy that attends to fewer than all tokens learns what
it needs to choose them from `RowKv.write`, from its turns' `begin` and `picks`, and when a step is left.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from baton.ids import SlotId
from baton.types import KvLayout, TokenRange
from generate_workers.residency.traits import PolicyTraits
from modeling.forward.decoder import LayerTurns, SequenceSpan
from modeling.kv.memory import PAGE_BYTES
from modeling.kv.staging import StagingFrames
from modeling.kv.transfers import Transfer

_NUM_SINKS = 16
"""First keys that drafts attend to, as in MagicDec (Sadhukhan et al., 2024)."""
StepRows = Sequence[tuple[SlotId, TokenRange]]
"""The slots of one forward, each with its new tokens; the KV of all earlier tokens is in place."""


class RowError(Exception):
    """One row's KV serves no step, so the step did not begin. Without that row it can."""

    def __init__(self, slot: SlotId, message: str) -> None:
        super().__init__(message)
        self.slot = slot


@dataclass(frozen=True)
class KvBytes:
    """Bytes of KV at home and on the device."""

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
    """The part of a row's keys that drafts attend to: the first and the latest."""

    num_first: int
    """Tokens at the row's start."""
    num_last: int
    """Latest tokens, those of drafts included."""
    most_drafts: int
    """Most tokens that drafts add before the step that verifies them."""

    @property
    def num_places(self) -> int:
        """Return the tokens that a copy of these keys has room for: the latest ones move along in it, and only rarely
        back to its start."""
        return self.num_first + 2 * self.num_last + self.most_drafts

    @classmethod
    def of(cls, num_keys: int, most_drafts: int) -> Self:
        """Divide so many keys, at least two, into a few first ones and the latest."""
        num_first = min(_NUM_SINKS, num_keys // 2)
        return cls(num_first, num_keys - num_first, most_drafts)


@dataclass(frozen=True)
class KvShape:
    """Size of the model's KV and of the batch, for which a policy reserves memory."""

    layout: KvLayout
    windows: Sequence[int | None]
    """By layer: the sliding window in tokens, or None."""
    num_slots: int
    max_slot_tokens: int
    draft_keys: DraftKeys | None = None
    """Keys that a policy which keeps KV at home copies to the device for drafts. None: there are no drafts."""
    chosen_drafts: bool = False
    """Whether drafts choose among all keys of a row, which policy `device` then keeps in one piece on every device."""
    most_new_tokens: int = 256
    """Most tokens of prompts that one step prefills."""

    @property
    def long_span_bytes(self) -> int:
        """Return the bytes that the new tokens of a step's longer spans take in one layer, each span in whole pages."""
        return self.most_new_tokens * self.layout.row_bytes + self.num_slots * PAGE_BYTES

    def bytes_read(self, rows: Iterable[TokenRange]) -> int:
        """Return the bytes that attention reads for rows with these new tokens, each key and value once."""
        seen = [(tokens.end, len(tokens)) for tokens in rows]
        counts = {window: self.windows.count(window) for window in set(self.windows)}
        num_rows = 0
        for window, num_layers in counts.items():
            num_rows += num_layers * sum(end if window is None else min(end, window + new - 1) for end, new in seen)
        return num_rows * self.layout.row_bytes


class RowKv(Protocol):
    """The KV of one slot's present claim. Used by one thread at a time."""

    @property
    def tokens(self) -> TokenRange:
        """Return the tokens that the claim may hold."""
        ...

    @property
    def num_bytes(self) -> KvBytes:
        """Return the bytes that are committed now, to the page."""
        ...

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy pushed KV, exactly the range's bytes, to where the policy keeps it. If `data` lies in a frame,
        it must not change before the transfer is done. Raises MemoryError when there is no memory for it."""
        ...

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of `tokens`, which were written; the memory itself where that is possible."""
        ...

    def release(self) -> None:
        """Give the memory back when the claim has ended. Idempotent."""
        ...


@runtime_checkable
class SharesPrefixes(Protocol):
    """A RowKv that shares blocks, which have names (`baton.prefix_blocks`), with rows that begin alike."""

    def begin_with(self, names: Sequence[str], block_tokens: int) -> int:
        """Begin with the leading blocks that the policy has; return their tokens. Nothing is written yet."""
        ...

    def keep(self, names: Sequence[str], block_tokens: int) -> None:
        """Leave the row's first blocks, whose KV is final, to rows that begin alike."""
        ...


class StepKv(Protocol):
    """One forward's view of its rows: the spans that the decoder runs, and the policy's turns between its layers."""

    @property
    def spans(self) -> Sequence[SequenceSpan]:
        """Return one span for each row of the step."""
        ...

    @property
    def num_bytes_read(self) -> int:
        """Return the bytes of KV that attention reads, in all layers."""
        ...

    @property
    def turns(self) -> LayerTurns | None:
        """Return the policy's turns between layers. None: the policy takes none, and rows attend to all keys."""
        ...


class Residency(Protocol):
    """One policy over all slots of a group. `open` and the rows' `write` and `release` are called from any thread, one
    at a time for a slot, and with frames all writes from one thread; `copy`, `step` and `close` from the engine's."""

    @property
    def traits(self) -> PolicyTraits:
        """Return the policy's name, and what is known of the policy by that name."""
        ...

    @property
    def frames(self) -> StagingFrames | None:
        """Return the frames that pushed KV is put into on its way to a device. None: it is written in place."""
        ...

    @property
    def num_link_bytes(self) -> int:
        """Return the bytes that steps and copies of rows brought between host and device so far; on a CPU those that
        attention read from home."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of the device that the policy holds beside its rows."""
        ...

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that a row of that many tokens takes."""
        ...

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> RowKv:
        """Begin a claim on a slot whose last row was released; `num_tokens` tokens will be written for sure."""
        ...

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy a row's first tokens to the row of another slot, which holds none."""
        ...

    def step(self, rows: StepRows) -> AbstractContextManager[StepKv]:
        """Commit memory for the new tokens, and prepare a forward. After leaving, no thread touches the rows any more,
        even if the forward failed. Raises RowError on entering, before anything has run."""
        ...

    def close(self) -> None:
        """End the policy's threads. Idempotent."""
        ...
