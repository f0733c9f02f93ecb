"""Verification of drafts: decides which drafts are accepted, by one of two rules.

Coupled: a draft is accepted if and only if the model samples the same token at that position, with the sequence's own
seed and output position. So the text is the same as without speculation, for any drafts. Temperature, filters,
penalties and logprobs apply unchanged.

Maximal (`baton.modeling.forward.speculative_sampling`): the largest number of drafts is accepted for which the
distribution of tokens is the same as without drafts. The text for a given seed depends on the drafts.

`engine.model_runner` computes the logits. If no sequence has drafts, the step itself may sample the tokens. The engine
accepts each token before the next one is sampled.

Shape suffixes: R rows of logits, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from baton.modeling.forward.sampling import sample
from baton.modeling.forward.speculative_sampling import verify_draft
from baton.types import DraftRound, SampledToken, SlotId
from generate_workers.engine.rows import Row


@dataclass(frozen=True)
class Draft:
    """Tokens drafted for one sequence."""

    token_ids: list[int]
    drafted_V: list[Tensor] | None = None
    """Distribution from which each token was sampled, for the maximal rule. None: each token had probability 1."""
    source: str = ""
    """Name of the draft source that made them."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, num_tokens: int) -> "Draft":
        drafted_V = None if self.drafted_V is None else self.drafted_V[:num_tokens]
        return Draft(self.token_ids[:num_tokens], drafted_V, self.source)


NO_DRAFT = Draft([])
Drafts = Mapping[SlotId, Draft]
"""Drafts of sequences, by slot. Sequences without drafts are absent."""


@dataclass(frozen=True)
class Verified:
    """Sequences that a step ran up to their last known token, and the logits that it computed for them."""

    logits_RV: Tensor
    """Logits, fp32. Each sequence has one row for the logits after its last known token, then one for each of its
    drafts."""
    rows: Sequence[tuple[Row, Draft, int]]
    """Sequences, each with its draft and the index of its first row of logits. Followers (further choices of a request)
    share their leader's logits."""
    chosen_R: Sequence[int] = ()
    """Next token of each sequence, if the step itself sampled them; `logits_RV` is then empty, and no sequence has
    drafts."""
    num_accepted: dict[SlotId, tuple[Row, int]] = field(default_factory=dict)
    """Sequences that had drafts, each with its number of accepted drafts, by slot. Complete when the iterator of
    `accept` has ended."""

    def accept(self, *, is_maximal: bool = False) -> Iterator[tuple[Row, SampledToken, DraftRound | None, bool]]:
        """Yield each sequence's next tokens, its accepted drafts and one more token, each as `(row, token, drafts,
        goes_on)`. `drafts`: result of the sequence's drafts up to and including this token; None for a sequence without
        drafts. `goes_on`: True if the step has another token for the sequence, unless the sequence ends with this
        token. Before it resumes the iterator, the caller must append the token to its sequence or end the sequence. May
        be called only once. Sets `num_cached` of each sequence to the number of its tokens whose KV is in place: the
        tokens known before the step, and the drafts accepted so far."""
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
        """Accept a sequence's draft at `index`, or sample another token. Return the token and whether the draft was
        accepted."""
        row, draft, first = each
        drafted_V = None if draft.drafted_V is None else draft.drafted_V[index]
        return verify_draft(self.logits_RV[first + index].clone(), row.sampler, draft.token_ids[index], drafted_V)
