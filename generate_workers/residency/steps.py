"""Base classes of residency policies whose slots are RowKv objects (`row_parts`): RowStep for steps, and RowResidency
for the policy.

`engine.model_runner` runs steps on the engine's thread. Shape suffixes: T tokens of all sequences, D hidden, N heads, H
head dim.
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
    """One step of a policy: the spans of its sequences, and the policy's turns (methods that run before and after each
    layer). In this class the turns do nothing; subclasses override them."""

    def __init__(self, rows: Sequence[tuple[R, TokenRange]], num_bytes_read: int) -> None:
        """`rows`: sequences of the step, each with its new tokens. Memory for the new tokens must be committed."""
        self.rows = rows
        self.spans: Sequence[SequenceSpan] = [row.span(tokens) for row, tokens in rows]
        self.num_bytes_read = num_bytes_read
        """Bytes of KV that attention reads. Subclasses that select keys add the bytes of each layer as it runs."""
        self.num_link_bytes = 0
        """Number of bytes that the step has copied between host and device so far, in both directions."""

    @property
    def turns(self) -> LayerTurns | None:
        """Return this object, which implements LayerTurns (methods that run between layers)."""
        return self

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Do nothing: all keys are already in the memory that attention reads."""

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return None: sequences attend to all keys."""
        return None

    def end(self, layer: int) -> None:
        """Do nothing after a layer: new keys stay in the memory to which they were written."""

    def settle(self) -> None:
        """Finish the work on stored KV that the step has begun, such as copies of new KV to host memory. Does nothing
        in this class. Called after a successful forward pass."""

    def leave(self) -> None:
        """Wait until no thread uses the sequences' memory. Called at the end of every step, even if the forward pass
        failed."""


class InPlaceStep(RowStep[R]):
    """Step of a policy that stores all keys where attention reads them. Nothing has to be done between layers."""

    @property
    def turns(self) -> None:
        """Return None: nothing has to be done between layers."""


class RowResidency(Generic[R]):
    """Residency whose slots are RowKv objects. A subclass makes these objects. It also provides the function that
    returns the RowStep of a forward pass."""

    traits: ClassVar[PolicyTraits]
    scratch_bytes = 0
    """Bytes of device memory that do not belong to any slot."""

    def __init__(self, rows: list[R], make_step: Callable[[Sequence[tuple[R, TokenRange]]], RowStep[R]]) -> None:
        """`rows`: one RowKv object for each slot. `make_step`: function that returns the RowStep of a forward pass. Its
        argument has a pair for each sequence: the RowKv object of the slot, and the new tokens. Memory for the new
        tokens is committed before the function is called. The function raises RowError if a sequence cannot run in this
        step."""
        self.num_link_bytes = 0
        self.frames = rows[0].frames
        """Staging frames (buffers in host memory) through which pushed KV is copied to a slot. None: KV is written
        directly to its final memory."""
        self._rows = rows
        self._make_step = make_step

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the number of bytes of memory that a sequence of `num_tokens` tokens takes."""
        return self._rows[0].bytes_for(num_tokens)

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> R:
        """Begin the use of a slot by a new sequence, and return the slot's KV object. `num_tokens`: number of tokens
        that are certain to be written. `capacity_tokens`: maximum number of tokens."""
        self._rows[slot].open(num_tokens, capacity_tokens)
        return self._rows[slot]

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of a slot's sequence to another slot, which must be empty."""
        self._rows[target].copy_from(self._rows[source], num_tokens)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[RowStep[R]]:
        """Commit memory for the new tokens, and yield the step. After a successful forward pass, `settle` completes the
        stored KV. `settle` is not called after a failed forward pass, because the sequences of such a step are
        ended."""
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
        """Do nothing, because this base class has no threads."""
