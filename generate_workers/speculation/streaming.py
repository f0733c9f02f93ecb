"""A draft view of each row's first and latest keys (StreamingLLM; Xiao et al., 2023), in the row's own KV.

Models rest attention on a text's first tokens (sinks) and need the latest; the keys between are left out. Nothing is
copied, and positions are the true ones, so that a row's keys serve drafts as they lie.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from baton.types import TokenRange
from generate_workers.engine.rows import Row
from generate_workers.residency.port import DraftKeys, Residency, StepRows
from generate_workers.speculation.self_drafts import DraftStep
from modeling.forward.decoder import SequenceSpan
from modeling.kv.buffers import KvPlace, KvRows


@dataclass(frozen=True)
class NarrowSpan:
    """A SequenceSpan whose new tokens do not attend to the keys `unseen`, which come before them."""

    whole: SequenceSpan
    unseen: TokenRange

    @property
    def tokens(self) -> TokenRange:
        return self.whole.tokens

    def own(self, layer: int) -> Tensor:
        return self.whole.own(layer)

    def segments(self, layer: int) -> Iterator[KvRows]:
        for rows in self.whole.segments(layer):
            for part in (rows.slice(0, self.unseen.start), rows.slice(self.unseen.end, rows.end_position)):
                if len(part.k_SGH):
                    yield part

    def place(self) -> KvPlace | None:
        place = self.whole.place()
        return None if place is None else replace(place, unseen=self.unseen)


class StreamingView:
    """A DraftView of the rows' first and latest keys, where they lie."""

    def __init__(self, residency: Residency, keys: DraftKeys) -> None:
        self._residency = residency
        self._num_first, self._num_last = keys.num_first, keys.num_last

    def begin(self, rows: Sequence[Row]) -> None:
        """Do nothing: the view is of the rows' own KV."""

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a forward over the first and latest keys of each row, the new token's among them."""
        with self._residency.step(rows) as step:
            unseen = [
                TokenRange(self._num_first, max(tokens.end - self._num_last, self._num_first)) for _, tokens in rows
            ]
            spans = [NarrowSpan(span, keys) if keys else span for span, keys in zip(step.spans, unseen, strict=True)]
            yield DraftStep(spans, step.turns)

    def forget(self, row: Row) -> None:
        """Do nothing: nothing is kept."""
