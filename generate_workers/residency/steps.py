"""Base classes of policies whose slots are StoredRows (`row_parts`): RowStep for steps, and RowResidency for the
policy. `engine.model_runner` runs steps on the engine's thread. Shape suffixes: T tokens of all sequences, D hidden, N
heads, H head dim.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from baton.modeling.forward.decoder import LayerTurns, SequenceSpan
from baton.modeling.forward.selection import Picks
from baton.types import SlotId, TokenRange
from generate_workers.residency.port import KvBytes, RowKv, StepRows
from generate_workers.residency.traits import PolicyTraits

R = TypeVar("R", bound=RowKv)


class RowStep(Generic[R]):
    """StepKv over the spans of the step's sequences. Its turns between layers do nothing, except in subclasses."""

    def __init__(self, rows: Sequence[tuple[R, TokenRange]], num_bytes_read: int) -> None:
        """`rows`: sequences, each with its new tokens, whose memory is committed."""
        self.rows = rows
        self.spans: Sequence[SequenceSpan] = [row.span(tokens) for row, tokens in rows]
        self.num_bytes_read = num_bytes_read
        """Bytes of KV that attention reads. Subclasses that select keys add the bytes of each layer as it runs."""
        self.num_link_bytes = 0
        """Bytes copied between host and device so far, in both directions."""

    @property
    def turns(self) -> LayerTurns | None:
        """Return this step, which implements the turns itself."""
        return self

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Do nothing: all keys are in place."""

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return None: sequences attend to all keys."""
        return None

    def end(self, layer: int) -> None:
        """Do nothing: new keys stay where they were written."""

    def settle(self) -> None:
        """Bring the sequences' stored KV up to date. Called after a forward that did not fail."""

    def leave(self) -> None:
        """Wait until no thread uses the sequences' memory. Called last, even if the forward failed."""


class InPlaceStep(RowStep[R]):
    """RowStep of a policy that keeps all keys where attention reads them. It has no work between layers."""

    @property
    def turns(self) -> None:
        """Return None: all keys are in place."""


class RowResidency(Generic[R]):
    """Residency whose slots are RowKv objects (Rows). A subclass makes the Rows, and provides the step that runs
    them."""

    traits: ClassVar[PolicyTraits]
    scratch_bytes = 0
    """Bytes of device memory that do not belong to any slot."""

    def __init__(self, rows: list[R], make_step: Callable[[Sequence[tuple[R, TokenRange]]], RowStep[R]]) -> None:
        """`rows`: one Row for each slot. `make_step`: function that makes a step for Rows with committed memory, or
        raises RowError."""
        self.num_link_bytes = 0
        self.frames = rows[0].frames
        """Staging frames through which pushed KV is copied to a slot. None: KV is written in place."""
        self._rows = rows
        self._make_step = make_step

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that a sequence of `num_tokens` tokens takes."""
        return self._rows[0].bytes_for(num_tokens)

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> R:
        """Begin a claim, and return the slot's Row."""
        self._rows[slot].open(num_tokens, capacity_tokens)
        return self._rows[slot]

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of a slot's sequence to another slot, which must be empty."""
        self._rows[target].copy_from(self._rows[source], num_tokens)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[RowStep[R]]:
        """Commit memory for the new tokens, and yield the step. After a failed forward pass `settle` is not called,
        because the step's sequences end."""
        chosen = [(self._rows[slot], tokens) for slot, tokens in rows]
        for row, tokens in chosen:
            row.commit(tokens)
        step = self._make_step(chosen)
        try:
            yield step
            step.settle()
        finally:
            step.leave()
            self.num_link_bytes += step.num_link_bytes

    def close(self) -> None:
        """Do nothing, since this policy has no threads."""
