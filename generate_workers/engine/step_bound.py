"""Limits prefill in steps that also decode (mixed steps), so that decoding sequences are delayed only a little.

A mixed step may take a multiple of the time that decoding alone takes, or `budget_s` seconds if that is more. If
`budget_s` is not 0 and no decoding sequence has more than one output token, only the number of tokens limits a step,
because no client reads a continuous text yet. The setting `step_budget_s` determines both values
(`baton.planning.local_prefill`).

The times of decoding and of prefill are predicted by the engine's StepCost (`baton.planning.step_cost`). If there are
drafts, "decoding alone" means a round: the draft steps, and the step that verifies the drafts. The next round is
expected to have as many drafts per sequence as the latest round.

`chunked_prefill` uses this module and reports the duration of each step. Owned by the engine's thread. The module does
not read a clock.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from baton.modeling.forward.model_config import ModelConfig
from baton.planning.local_prefill import stretch
from baton.planning.step_cost import StepCost, StepKind
from baton.planning.work_cost import NO_WORK, StepWork
from baton.types import TokenRange
from generate_workers.engine.model_shape import model_shape

_MOST_MIXED = 32
"""Number of successive mixed steps after which one step only decodes. This step measures the time of decoding alone,
which cannot be measured in mixed steps."""


@dataclass(frozen=True)
class Decoding:
    """Decoding part of a step: the number of sequences that decode, and their work."""

    num_rows: int
    num_tokens: int
    """Total number of tokens to which all decoding sequences attend."""
    drafts: StepWork = NO_WORK
    """Additional work of the step for verifying drafts."""
    draft_s: float = 0.0
    """Seconds of the draft steps before the step. They are predicted in a plan, and measured after the step."""
    is_streaming: bool = True
    """True if a sequence has produced more than one output token, so that its client would notice a pause."""

    @property
    def has_drafts(self) -> bool:
        """True if the step verifies drafts."""
        return self.drafts.num_tokens > 0

    @property
    def work(self) -> StepWork:
        """Work of the step: decoding and verifying drafts. Draft steps are not included."""
        return StepWork.plain(self.num_rows, self.num_tokens) + self.drafts if self.num_rows else self.drafts

    def drafting_as(self, other: "Decoding") -> "Decoding":
        """Return a copy of this object with estimated drafts: as many drafts per sequence as in `other`, which must
        have at least one sequence."""
        share, drafts = self.num_rows / other.num_rows, other.drafts
        tokens, keys, pairs = (round(share * part) for part in (drafts.num_tokens, drafts.num_keys, drafts.num_pairs))
        added = StepWork(tokens, keys, pairs, drafts.num_steps)
        return replace(self, drafts=added, draft_s=other.draft_s)  # mostly the time of reading weights, which is shared


NO_DECODING = Decoding(0, 0)


@dataclass(frozen=True)
class PrefillWork:
    """Converts prefill tokens of a sequence to work. The unit of work is the FLOPs of one token without attention."""

    pair_work: float = 0.0
    """Work of one query-key pair of attention, in units of the FLOPs of one token without attention."""

    @classmethod
    def of_model(cls, config: ModelConfig) -> "PrefillWork":
        """Return the PrefillWork of a model. The work of a query-key pair is computed from the model's FLOPs."""
        shape = model_shape(config, dtype_bytes=2)  # FLOPs do not depend on dtype_bytes
        return cls(shape.pair_flops / shape.linear_flops)

    def of(self, tokens: TokenRange) -> float:
        """Return the work of prefilling the chunk `tokens`. Its tokens attend to each other (causally) and to all
        earlier tokens."""
        num_pairs = len(tokens) * tokens.start + len(tokens) * (len(tokens) + 1) / 2
        return len(tokens) + self.pair_work * num_pairs

    def num_fitting(self, start: int, most: float) -> int:
        """Return the maximum number of tokens that can be prefilled from position `start` with at most `most` units of
        work. `most` must be finite."""
        linear, square = 1 + self.pair_work * (start + 0.5), self.pair_work / 2
        root = math.sqrt(linear * linear + 4 * square * max(most, 0.0))
        return int(2 * max(most, 0.0) / (root + linear))


class StepBound:
    """Limit of prefill in steps that also decode (mixed steps).

    A mixed step takes at most `max_stretch` times as long as decoding alone would, or `budget_s` seconds, whichever
    is longer. If `budget_s` is not 0, mixed steps have no time limit until a decoding sequence has more than one output
    token.
    """

    def __init__(self, cost: StepCost, max_stretch: float, budget_s: float = 0.0) -> None:
        """Create a limit. `cost` predicts the durations of steps."""
        assert max_stretch >= 1 and budget_s >= 0
        self.cost = cost
        self._max_stretch = max_stretch
        self._budget_s = budget_s
        self._latest: Decoding | None = None
        """Decoding part of the latest step with decoding sequences. None until such a step has run."""
        self._most_rows = 0
        """Maximum number of sequences of the steps that only decoded."""
        self._num_mixed = 0
        """Number of mixed steps since the latest step that only decoded."""

    @classmethod
    def of(cls, step_budget_s: float, cost: StepCost) -> Self:
        """Return the limit for a value of the setting `step_budget_s`."""
        return cls(cost, stretch(step_budget_s), step_budget_s)

    def decode_s(self, decoding: Decoding) -> float:
        """Return the predicted seconds of a step that only decodes, including its drafts."""
        cost = self.cost.verifying if decoding.has_drafts else self.cost.plain
        return cost.seconds(decoding.work) + decoding.draft_s

    def expected_s(self, decoding: Decoding, work: float) -> float:
        """Return a rough prediction of the seconds of a step with `work` units of prefill, before drafts are
        planned."""
        return self.decode_s(decoding) + work * self.cost.prefill_s

    def max_work(self, decoding: Decoding) -> float:
        """Return the maximum prefill work of the next step, in units of PrefillWork.

        The result is infinity without a limit, if no sequence decodes, or if the step `may_burst`. The drafts of the
        next step are not planned yet. As many drafts per sequence as in the latest step are assumed.
        """
        if not decoding.num_rows or self.may_burst(decoding):
            return math.inf
        decode_s = self.decode_s(decoding if self._latest is None else decoding.drafting_as(self._latest))
        return (self._bound_s(decode_s) - decode_s) / self.cost.prefill_s

    def may_burst(self, decoding: Decoding) -> bool:
        """Return True if one step may prefill all waiting prompts, regardless of its duration. This requires that
        `budget_s` is neither 0 nor infinity, and that no sequence has more than one output token."""
        return 0 < self._budget_s < math.inf and not decoding.is_streaming

    def is_to_decode_alone(self, decoding: Decoding) -> bool:
        """Return True if the next step should only decode, so that the cost of decoding is measured. This is the case
        after `_MOST_MIXED` successive mixed steps. It is also the case after one mixed step if more sequences decode
        now than in any earlier step that only decoded, or if the mixed step took less than the predicted time of
        decoding alone. It is never the case directly after a step that only decoded. Pipelined steps are planned before
        the step before them is observed, so there it may be the case twice in succession."""
        is_unlimited = math.inf in (self._max_stretch, self._budget_s)
        if not self._num_mixed or not decoding.num_rows or is_unlimited:
            return False
        is_due = self.cost.is_decode_due or decoding.num_rows > self._most_rows
        return self._num_mixed >= (1 if is_due else _MOST_MIXED)

    def observe(self, decoding: Decoding, work: float, seconds: float) -> None:
        """Record the duration of a step, in seconds, to improve later predictions. The step decoded the sequences of
        `decoding`, and prefilled `work` units of work."""
        if decoding.num_rows:
            self._num_mixed = self._num_mixed + 1 if work else 0
            self._latest = decoding
        if not work:
            self._most_rows = max(self._most_rows, decoding.num_rows)
        kind = StepKind.VERIFYING if decoding.has_drafts else StepKind.PLAIN
        self.cost.observe(decoding.work, work, seconds - decoding.draft_s, kind)

    def _bound_s(self, decode_s: float) -> float:
        """Return the maximum seconds of a mixed step whose decoding alone takes `decode_s` seconds."""
        return max(self._max_stretch * decode_s, self._budget_s)
