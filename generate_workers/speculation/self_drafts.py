"""Drafts by the model itself over a part of each row's KV (MagicDec; Sadhukhan et al., 2024).

At long contexts a step's time goes into reading KV; a step over few keys takes a small part of it, and its tokens are
mostly those of the whole KV. A view says which keys those are. A draft step writes its keys and values where the row's
next ones belong; the step that verifies writes them anew, so that drafts never read what they have computed before.

`speculator` calls this on the engine's thread.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.types import TokenRange
from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft
from generate_workers.residency.port import StepRows
from generate_workers.speculation.port import DraftWish, Offer
from generate_workers.speculation.stepwise import Going, draft_by_steps
from modeling.forward.decoder import Decoder, LayerTurns, SequenceSpan
from modeling.forward.selection import StepPicks


@dataclass(frozen=True)
class DraftStep:
    """One forward's view of its rows."""

    spans: Sequence[SequenceSpan]
    """A span of one new token for each row, over the keys of the view."""
    turns: LayerTurns | None = None
    """What is to be done between layers; None: nothing."""
    picks: StepPicks | None = None
    """The keys that the spans attend to, where they are known before the forward; None: all, or those of `turns`."""


class DraftView(Protocol):
    """The part of each row's KV that draft steps attend to."""

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Prepare for the drafts of a round: the rows' KV is final up to `num_cached`. `num_keys`: those that each row
        attends to, for views that take other numbers than they were made for; 0, or none: as made."""
        ...

    def step(self, rows: StepRows) -> AbstractContextManager[DraftStep]:
        """Prepare a forward of one new token a row, as `Residency.step` does, over the keys of the view. The rows are
        among those of the round, in their order."""
        ...

    def forget(self, row: Row) -> None:
        """Drop what is kept of a row, which gives its slot back."""
        ...


class SelfDrafter:
    """A Drafter that runs the model over a view of the rows' KV, a token at a time for all rows."""

    def __init__(self, decoder: Decoder, view: DraftView, num_keys: Sequence[int], *, keeps: bool = False) -> None:
        """`num_keys`: keys that a row's draft steps may attend to; first those for which the view was made, others only
        for a view that takes them. `keeps`: whether drafts come with the distributions that they were drawn from."""
        self._decoder = decoder
        self._view = view
        self._num_keys = num_keys
        self._keeps = keeps

    def offers(self, row: Row, wished: int) -> Sequence[Offer]:
        """Offer `wished` drafts, for the model always finds a token: over each number of keys that tells the row's keys
        apart. Drafts are of one kind by that number."""
        num_all, (first, *others) = row.num_known, self._num_keys
        told_apart = [num for num in others if min(num, num_all) != min(first, num_all)]
        return [Offer(wished, 0, first), *(Offer(wished, num, num) for num in told_apart)]

    def prepare(self, rows: Sequence[Row]) -> None:
        """Do nothing: the view is prepared with each round's drafts."""

    @torch.inference_mode()
    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """Return as many drafts as wished for, each the token that its row would sample from the view's logits."""
        self._view.begin([wish.row for wish in wishes], [wish.num_keys for wish in wishes])
        return draft_by_steps(wishes, self._run, keeps=self._keeps)

    def forget(self, row: Row) -> None:
        """Let the view forget the row."""
        self._view.forget(row)

    def _run(self, going: Going, index: int) -> Tensor:
        """Run each row's last token over the keys of the view."""
        last_ids = [draft.token_ids[-1] if draft else row.token_ids[-1] for row, draft in going]
        ends = [row.num_known + index for row, _ in going]
        spans = [(row.slot, TokenRange(end - 1, end)) for (row, _), end in zip(going, ends, strict=True)]
        with self._view.step(spans) as step:
            hidden_TD = self._decoder.forward(last_ids, step.spans, step.turns, picks=step.picks)
        return self._decoder.logits(hidden_TD)
