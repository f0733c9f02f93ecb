"""Which drafts become tokens: those that the model samples too.

The rule is coupled: a draft is accepted if and only if it is the token that the model samples at that place, by the
row's own seed and output position. So a row's text is the one that it would have without speculation, whatever was
drafted, and with temperature, filters, penalties and logprobs as they are.

`engine.step_runner` makes the logits; the engine takes each token before the next one is sampled.

R rows of logits, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from baton.ids import SlotId
from baton.types import SampledToken
from generate_workers.engine.rows import Row
from modeling.forward.sampling import sample

Drafts = Mapping[SlotId, list[int]]
"""Drafts of rows, by slot; rows without any are not in it."""


@dataclass(frozen=True)
class Verified:
    """Rows that a step brought to their last known token, and the logits that it made for them."""

    logits_RV: Tensor
    """Logits of what follows, fp32: of a row's last known token, then of its drafts, one after the other."""
    rows: Sequence[tuple[Row, Sequence[int], int]]
    """Rows, each with its drafts and the place of its first logits, which followers share with their leader."""
    num_accepted: dict[SlotId, tuple[Row, int]] = field(default_factory=dict)
    """Rows that had drafts, by the slot that they had, and how many were accepted; complete once `accept` has ended."""

    def accept(self) -> Iterator[tuple[Row, SampledToken]]:
        """Yield each row's next tokens: its accepted drafts, and one more. The caller takes each token into its row, or
        ends the row, before it asks for the next; once only. A row's KV counts as far as its tokens are the drafts."""
        num_cached = {row: row.num_cached for row, *_ in self.rows}
        slots = {row: row.slot for row, drafts, _ in self.rows if drafts}
        going, index = list(self.rows), 0
        while going:
            places = [first + index for *_, first in going]
            are_all = places == list(range(len(self.logits_RV)))
            logits_BV = self.logits_RV if are_all else self.logits_RV[places]  # a copy: sampling changes them
            tokens = sample(logits_BV, [row.sampler for row, *_ in going])
            agreeing = []
            for each, token in zip(going, tokens, strict=True):
                row, drafts, _ = each
                row.num_cached = num_cached[row] + index
                yield row, token
                if index < len(drafts):
                    is_accepted = token.token_id == drafts[index]
                    self.num_accepted[slots[row]] = row, index + is_accepted
                    if is_accepted and row.seat is not None:
                        agreeing.append(each)
            going, index = agreeing, index + 1
