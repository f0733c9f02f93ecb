"""The residency port: a policy owns the memory of all slots' KV, and says where a step finds it, layer by layer.

Step 8 of a request's way (DESIGN.md, sections 4 and 5). Two memories are told apart: the *device's*, where attention
reads, and *home*, where KV lives between steps; for a policy that keeps all of it on the device they are one, and count
as both. A policy that attends to less than all tokens says so (`is_exact`); it takes what it needs to choose them from
`RowKv.write`, from its turns' `begin` and `picks`, and when a step is left.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton.ids import SlotId
from baton.types import KvLayout, TokenRange
from modeling.forward.decoder import LayerTurns, SequenceSpan

StepRows = Sequence[tuple[SlotId, TokenRange]]
"""The slots of one forward, each with its new tokens; all earlier ones are there."""


class RowError(Exception):
    """One row's KV serves no step, which therefore did not begin: without that row it can."""

    def __init__(self, slot: SlotId, message: str) -> None:
        super().__init__(message)
        self.slot = slot


@dataclass(frozen=True)
class KvBytes:
    """Bytes of KV, by the memory that they take."""

    home: int = 0
    device: int = 0

    def __add__(self, other: "KvBytes") -> "KvBytes":
        return KvBytes(self.home + other.home, self.device + other.device)

    def __sub__(self, other: "KvBytes") -> "KvBytes":
        return KvBytes(self.home - other.home, self.device - other.device)

    def __mul__(self, count: int) -> "KvBytes":
        return KvBytes(self.home * count, self.device * count)


@dataclass(frozen=True)
class KvShape:
    """What a policy needs to know of the model and the batch."""

    layout: KvLayout
    windows: Sequence[int | None]
    """By layer: the sliding window in tokens, or None."""
    num_slots: int
    max_slot_tokens: int

    def bytes_read(self, rows: Iterable[TokenRange]) -> int:
        """What attention to all tokens reads for rows with these new tokens, each key and value once."""
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
        """That it may hold."""
        ...

    @property
    def num_bytes(self) -> KvBytes:
        """Committed now, to the page."""
        ...

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copies pushed KV, exactly the range's bytes, to where the policy keeps it."""
        ...

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """The bytes of `tokens`, which were written; the memory itself where that is possible."""
        ...

    def release(self) -> None:
        """Gives the memory back; the claim has ended. Idempotent."""
        ...


class StepKv(Protocol):
    """One forward's view of its rows: the spans that the decoder runs, and who takes part between its layers."""

    @property
    def spans(self) -> Sequence[SequenceSpan]:
        """One for each row."""
        ...

    @property
    def num_bytes_read(self) -> int:
        """KV that attention reads, in all layers."""
        ...

    @property
    def turns(self) -> LayerTurns | None:
        """Who takes part in the forward between layers; None: nobody, and rows attend to all keys."""
        ...


class Residency(Protocol):
    """One policy over all slots of a group. `open` and the rows' `write` and `release` come from any thread, one at a
    time for a slot; `copy`, `step` and `close` from the engine's."""

    @property
    def name(self) -> str:
        """As configured."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether every token attends to all before it."""
        ...

    @property
    def num_link_bytes(self) -> int:
        """Copied between host and device so far, or read from home by attention where a CPU is both."""
        ...

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """What a row of that many tokens takes."""
        ...

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> RowKv:
        """A new claim on a slot whose last row was released; `num_tokens` will be written for sure."""
        ...

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copies a row's first tokens to another slot's row, which has none."""
        ...

    def step(self, rows: StepRows) -> AbstractContextManager[StepKv]:
        """Takes memory for the new tokens, and prepares a forward. On leaving, nobody touches the rows any more,
        however the forward went. Raises RowError on entering, before anything has run."""
        ...

    def close(self) -> None:
        """Ends the policy's threads. Idempotent."""
        ...
