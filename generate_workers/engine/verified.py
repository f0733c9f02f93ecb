"""Verification of drafts: decides which drafts are accepted, by one of two rules.

- Coupled: a draft is accepted if and only if the model samples the same token at this position, with the sequence's own
  seed and output position. The text is therefore the same as without speculation, for any drafts. Temperature, filters,
  penalties and logprobs apply unchanged.
- Maximal (`baton.modeling.forward.speculative_sampling`): accepts as many drafts as possible without
  changing the distribution of tokens. The text for a given seed depends on the drafts.

`engine.model_runner` computes the logits. The engine accepts each token before the next one is sampled.

Shape suffixes: R rows of logits, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from baton.modeling.forward.drawing import NO_TOKEN
from baton.modeling.forward.sampling import sample
from baton.modeling.forward.speculative_sampling import verify_draft
from baton.modeling.forward.step_graphs import PendingTokens
from baton.types import DraftRound, SampledToken, SlotId
from generate_workers.engine.rows import Row


@dataclass(frozen=True)
class Draft:
    """Draft of one sequence: the tokens that are proposed to follow it."""

    token_ids: list[int]
    """Proposed tokens. 0 for tokens that the host has not read."""
    drafted_V: list[Tensor] | None = None
    """Probability distribution from which each draft token was sampled, for the maximal rule. None: the draft source
    did not sample, so that each draft token counts as having probability 1."""
    source: str = ""
    """Name of the draft source that made the tokens. Empty if there are none."""
    unread: list[tuple[PendingTokens, int]] = field(default_factory=list)
    """For each token, the draft step that draws it on the device, and its index among the tokens of this step. Empty if
    the host knows the tokens."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, num_tokens: int) -> "Draft":
        drafted_V = None if self.drafted_V is None else self.drafted_V[:num_tokens]
        return Draft(self.token_ids[:num_tokens], drafted_V, self.source, self.unread[:num_tokens])

    def read(self) -> None:
        """Wait for the tokens, if the host has not read them."""
        for index, (step, place) in enumerate(self.unread):
            self.token_ids[index] = step.result()[place].token_id
        self.unread.clear()


NO_DRAFT = Draft([])
Drafts = Mapping[SlotId, Draft]
"""Drafts of sequences, by slot. A sequence without drafts is not in the mapping."""


@dataclass(frozen=True)
class Verified:
    """Result of a step: the sequences whose last known token was run, and their logits."""

    logits_RV: Tensor
    """Logits in fp32. A sequence has one row for its last known token, and one row for each of its drafts."""
    rows: Sequence[tuple[Row, Draft, int]]
    """Tuples (sequence, draft of the sequence, index in `logits_RV` of the sequence's first row). A follower (further
    choice of a request) has the index of its leader, the first choice, because both sample from the same logits."""
    drawn_R: Sequence[SampledToken] | None = None
    """Token that the step itself has drawn from each row of logits. In this case `logits_RV` is empty."""
    num_accepted: dict[SlotId, tuple[Row, int]] = field(default_factory=dict)
    """Pairs (sequence, number of its accepted drafts), by slot, for the sequences that had drafts. Complete when the
    iterator of `accept` has ended."""

    def accept(self, *, is_maximal: bool = False) -> Iterator[tuple[Row, SampledToken, DraftRound | None, bool]]:
        """Yield the next tokens of all sequences: the accepted drafts of each, and one further token. May be called
        only once.

        Each item is a tuple `(row, token, drafts, goes_on)`. `drafts` is the result of the sequence's drafts up to this
        token, or None if the sequence had no drafts. `goes_on` is True if the step has a further token for the
        sequence. Before the caller requests the next item, it must append the token to the sequence or end the
        sequence. The method sets `num_cached` of each sequence to the number of its tokens whose KV is complete.
        """
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
                yield row, token, drafts, is_accepted
                if index < len(draft):
                    self.num_accepted[slots[row]] = row, index + is_accepted
                    if is_accepted and row.batch_slot is not None:
                        agreeing.append(each)
            going, index = agreeing, index + 1

    def _coupled(self, rows: Sequence[tuple[Row, Draft, int]], index: int) -> dict[Row, tuple[SampledToken, bool]]:
        """Sample each sequence's next token. Return, by sequence, the token and whether it equals the draft."""
        places = [first + index for *_, first in rows]
        if self.drawn_R is not None:
            tokens = [self.drawn_R[place] for place in places]
        else:
            are_all = places == list(range(len(self.logits_RV)))
            logits_BV = self.logits_RV if are_all else self.logits_RV[places]  # a copy: sampling changes them
            tokens = sample(logits_BV, [row.sampler for row, *_ in rows]) if rows else []
        found = zip(rows, tokens, strict=True)
        return {
            row: (token, [token.token_id] == draft.token_ids[index : index + 1] != [NO_TOKEN])
            for (row, draft, _), token in found
        }

    def _maximal(self, each: tuple[Row, Draft, int], index: int) -> tuple[SampledToken, bool]:
        """Accept a sequence's draft at `index`, or sample another token. Return the token and whether the draft was
        accepted."""
        row, draft, first = each
        drafted_V = None if draft.drafted_V is None else draft.drafted_V[index]
        return verify_draft(self.logits_RV[first + index].clone(), row.sampler, draft.token_ids[index], drafted_V)
