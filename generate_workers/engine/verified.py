"""Which drafts become tokens: those that the model samples too, by one of two rules.

Coupled: a draft is accepted if and only if it is the token that the model samples at that place, by the row's own seed
and output position. So a row's text is the one that it would have without speculation, whatever was drafted, and with
temperature, filters, penalties and logprobs as they are. Maximal (`modeling.forward.speculative_sampling`): as many
drafts are accepted as a rule can that leaves tokens distributed as without drafts; but the text of a seed changes with
what was drafted.

`engine.step_runner` makes the logits, or, for rows without drafts, has the tokens drawn by the step itself; the engine
takes each token before the next one is sampled.

R rows of logits, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from baton.ids import SlotId
from baton.types import DraftRound, SampledToken
from generate_workers.engine.rows import Row
from modeling.forward.sampling import sample
from modeling.forward.speculative_sampling import verify_draft


@dataclass(frozen=True)
class Draft:
    """Tokens drafted for a row."""

    token_ids: list[int]
    drafted_V: list[Tensor] | None = None
    """The distributions that they were drawn from, for the maximal rule. None: each was certain."""
    source: str = ""
    """Name of the way to draft that they come from."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, num_tokens: int) -> "Draft":
        """Return the draft's first tokens."""
        drafted_V = None if self.drafted_V is None else self.drafted_V[:num_tokens]
        return Draft(self.token_ids[:num_tokens], drafted_V, self.source)


NO_DRAFT = Draft([])
Drafts = Mapping[SlotId, Draft]
"""Drafts of rows, by slot; rows without any are not in it."""


class Taken(NamedTuple):
    """A row's next token."""

    row: Row
    token: SampledToken
    drafts: DraftRound | None
    """The row's drafts as far as they have become tokens, this one included; None for a row that had none."""
    goes_on: bool
    """Whether the step brings another token, unless the row ends with this one."""


@dataclass(frozen=True)
class Verified:
    """Rows that a step brought to their last known token, and the logits that it made for them."""

    logits_RV: Tensor
    """Logits of what follows, fp32: of a row's last known token, then of its drafts, one after the other."""
    rows: Sequence[tuple[Row, Draft, int]]
    """Rows, each with its draft and the place of its first logits, which followers share with their leader."""
    chosen_R: Sequence[int] = ()
    """The rows' next tokens, where the step itself has drawn them: then there are neither drafts nor logits."""
    num_accepted: dict[SlotId, tuple[Row, int]] = field(default_factory=dict)
    """Rows that had drafts, by the slot that they had, and how many were accepted; complete once `accept` has ended."""

    def accept(self, *, is_maximal: bool = False) -> Iterator[Taken]:
        """Yield each row's next tokens: its accepted drafts, and one more. The caller takes each token into its row, or
        ends the row, before it asks for the next; once only. A row's KV counts as far as its tokens are the drafts."""
        num_cached = {row: row.num_cached for row, *_ in self.rows}
        slots = {row: row.slot for row, draft, _ in self.rows if draft}
        going, index = list(self.rows), 0
        while going:
            drafting = [each for each in going if is_maximal and index < len(each[1])]
            found = {each[0]: self._maximal(each, index) for each in drafting}
            found |= self._coupled([each for each in going if each[0] not in found], index)
            agreeing = []
            for each in going:
                row, draft, _ = each
                token, is_accepted = found[row]
                row.num_cached = num_cached[row] + index
                drafts = DraftRound(draft.source, len(draft), index + is_accepted, index + 1) if draft else None
                yield Taken(row, token, drafts, is_accepted)
                if index < len(draft):
                    self.num_accepted[slots[row]] = row, index + is_accepted
                    if is_accepted and row.seat is not None:
                        agreeing.append(each)
            going, index = agreeing, index + 1

    def _coupled(self, rows: Sequence[tuple[Row, Draft, int]], index: int) -> dict[Row, tuple[SampledToken, bool]]:
        """Sample each row's next token, and say whether it is the draft."""
        if self.chosen_R:
            return {row: (SampledToken(self.chosen_R[place]), False) for row, _, place in rows}
        places = [first + index for *_, first in rows]
        are_all = places == list(range(len(self.logits_RV)))
        logits_BV = self.logits_RV if are_all else self.logits_RV[places]  # a copy: sampling changes them
        tokens = sample(logits_BV, [row.sampler for row, *_ in rows]) if rows else []
        found = zip(rows, tokens, strict=True)
        return {
            row: (token, [token.token_id] == draft.token_ids[index : index + 1]) for (row, draft, _), token in found
        }

    def _maximal(self, each: tuple[Row, Draft, int], index: int) -> tuple[SampledToken, bool]:
        """Accept a row's draft, or draw another token."""
        row, draft, first = each
        drafted_V = None if draft.drafted_V is None else draft.drafted_V[index]
        return verify_draft(self.logits_RV[first + index].clone(), row.sampler, draft.token_ids[index], drafted_V)
