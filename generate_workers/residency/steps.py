"""Policies whose slots are Rows (`rows`): what their steps share, and the Residency that opens, copies and runs rows.

`engine.step_runner` runs steps on the engine's thread. T tokens of all rows, D hidden, N heads, H head dim.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from torch import Tensor

from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.residency.port import KvBytes, RowKv, StepRows
from generate_workers.residency.traits import PolicyTraits
from modeling.forward.decoder import LayerTurns, SequenceSpan
from modeling.forward.selection import Picks
from modeling.kv.staging import StagingFrames


class Row(RowKv, Protocol):
    """A slot's row of KV, claim after claim."""

    @property
    def frames(self) -> StagingFrames | None:
        """Return the frames that pushed KV is put into on its way to the row. None: it is written in place."""
        ...

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that so many tokens take once all are written."""
        ...

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; `num_tokens` tokens will be written for sure. When it fails, nothing is held."""
        ...

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Take over the first `num_tokens` tokens of another row of the policy."""
        ...

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens`, which a step is about to write."""
        ...

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the span of a step whose new tokens are `tokens`."""
        ...


R = TypeVar("R", bound=Row)


class RowStep(Generic[R]):
    """A StepKv over the rows' spans. Its turns do nothing, but for what a subclass does in them."""

    def __init__(self, rows: Sequence[tuple[R, TokenRange]], num_bytes_read: int) -> None:
        """`rows`: each with its new tokens, whose memory is committed."""
        self.rows = rows
        self.spans: Sequence[SequenceSpan] = [row.span(tokens) for row, tokens in rows]
        self.num_bytes_read = num_bytes_read
        """Bytes of KV that attention reads, in all layers that have run."""
        self.num_link_bytes = 0
        """Bytes copied between host and device so far, in both directions."""

    @property
    def turns(self) -> LayerTurns | None:
        """Return this step, which takes the turns itself."""
        return self

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Do nothing: all keys are in place."""

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return None: rows attend to all keys."""
        return None

    def end(self, layer: int) -> None:
        """Do nothing: new keys stay where they were written."""

    def settle(self) -> None:
        """Bring the rows up to date, after the forward has ended well."""

    def leave(self) -> None:
        """Return when no thread touches the rows any more. Called last, even if the forward failed."""


class RowResidency(Generic[R]):
    """A Residency of Rows. A subclass makes them, and says what runs them."""

    traits: ClassVar[PolicyTraits]
    scratch_bytes = 0
    """Bytes of the device that belong to no row."""

    def __init__(self, rows: list[R], make_step: Callable[[Sequence[tuple[R, TokenRange]]], RowStep[R]]) -> None:
        """`rows`: one for each slot. `make_step`: makes a step of rows with committed memory, or raises RowError."""
        self.num_link_bytes = 0
        self.frames = rows[0].frames
        """Frames that pushed KV is put into on its way to a row. None: it is written in place."""
        self._rows = rows
        self._make_step = make_step

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that a row of that many tokens takes."""
        return self._rows[0].bytes_for(num_tokens)

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> R:
        """Begin a claim, and return the slot's row."""
        self._rows[slot].open(num_tokens, capacity_tokens)
        return self._rows[slot]

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy a row's first tokens to the row of another slot, which holds none."""
        self._rows[target].copy_from(self._rows[source], num_tokens)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[RowStep[R]]:
        """Commit the new tokens, and yield the step. Rows of a failed forward are not brought up to date: they end."""
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
        """Do nothing: this policy has no threads."""
