"""Chooses the number of draft tokens of each sequence in a round of speculative decoding, so that the expected number
of tokens per second is largest.

A round consists of some draft steps and one step that verifies the drafts (MagicDec; Sadhukhan et al., 2024, section
4). A draft is accepted with probability a if all drafts before it were accepted. With g drafts, a sequence gets

    1 + a + a^2 + ... + a^g = (1 - a^(g + 1)) / (1 - a)    expected tokens, including one from the model itself

(Leviathan, Kalman and Matias, 2023). Verifying drafts does not read more keys (`baton.planning.work_cost`). It
therefore costs little if reading keys takes most of a step's time. `generate_workers.speculation` calls `plan_round`
for each round. All functions are pure.

Shape suffixes: B sequences, K options of a sequence, G drafts of a sequence, N numbers of draft steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.limits import MAX_DRAFTS
from baton.planning.work_cost import WorkCost

MOST_DRAFTS = MAX_DRAFTS
"""Maximum number of drafts of one sequence in a round."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_DRAFTS_G = np.arange(1, MOST_DRAFTS + 1)
_NEVER = 1e-9
"""Smallest probability with which logarithms are calculated, of acceptance and of rejection."""
_FREE = 1e-300
"""Smallest number of tokens in the time of a draft with which logarithms are calculated. Learnt costs may be 0."""


@dataclass(frozen=True)
class DraftOptions:
    """Options for making drafts for the sequences of a batch: K per sequence, of which one is chosen."""

    contexts_B: Ints
    """Number of keys that each sequence attends to, including the key of its last token."""
    acceptance_BK: Floats
    """Probability that a draft is accepted if all drafts before it were accepted."""
    most_drafts_BK: Ints
    """Maximum number of drafts, at most MOST_DRAFTS. 0 if the sequence does not have the option."""
    draft_keys_BK: Ints
    """Number of keys that a draft step attends to. 0 if drafts are made without a draft step."""

    def of(self, is_wanted_B: NDArray[np.bool_]) -> "DraftOptions":
        """Return the options of the sequences for which `is_wanted_B` is True."""
        return DraftOptions(*(each[is_wanted_B] for each in vars(self).values()))


@dataclass(frozen=True)
class Round:
    """Plan for a round of speculative decoding (draft steps, and one step that verifies the drafts): the number of
    drafts of each sequence, the expected number of tokens, and the predicted durations of the steps."""

    num_drafts_B: Ints
    """Number of drafts of each sequence. If all numbers are 0, the round is a normal decode step."""
    chosen_B: Ints
    """Chosen option of each sequence. Has no meaning for a sequence without drafts."""
    num_steps: int
    """Number of draft steps."""
    num_tokens: float
    """Expected number of tokens from the round, summed over all sequences."""
    draft_s: float
    """Predicted duration in seconds of all draft steps of the round."""
    verify_s: float
    """Predicted seconds of the step that verifies the drafts."""

    @property
    def rate(self) -> float:
        """Return the expected number of tokens per second: `num_tokens` divided by the seconds of all steps."""
        return self.num_tokens / (self.draft_s + self.verify_s)


def plan_round(
    options: DraftOptions, cost: WorkCost, draft_cost: WorkCost | None = None, plain_cost: WorkCost | None = None
) -> Round:
    """Return the round with the largest expected number of tokens per second. If no round is better than a normal
    decode step, return that step.

    `cost` is the cost of steps that verify drafts. `draft_cost` is the cost of draft steps, and `plain_cost` that of
    steps without drafts; None: the same as `cost`.

    Each further draft of a sequence adds a fixed time, and at most as many expected tokens as the draft before it. At a
    rate of r tokens per second, a draft is worthwhile if it adds more tokens than r times its seconds. The surplus of
    an option is the number of tokens that its worthwhile drafts add, minus r times their seconds.

    Two operations are repeated until the rate does not increase (Dinkelbach, 1967). For each number of draft steps, the
    option with the largest surplus is chosen for each sequence. Then r is set to the largest rate of the resulting
    rounds.
    """
    search = _Search(options, cost, draft_cost or cost, plain_cost or cost)
    best = search.plain
    num_steps_N = search.promising_steps(best.rate)
    while (found := search.best_at(best.rate, num_steps_N)).rate > best.rate * (1 + 1e-12):
        best = found
    return best


def plan_at_rate(
    options: DraftOptions, cost: WorkCost, draft_cost: WorkCost | None, last: Round, plain_cost: WorkCost | None = None
) -> Round:
    """Return the best round at the rate of `last`, with no draft steps or at most as many as `last` has. If a normal
    decode step is better, return that step. This is faster than `plan_round`, and nearly as good if `last` was planned
    for nearly the same options and costs."""
    search = _Search(options, cost, draft_cost or cost, plain_cost or cost)
    found = search.within(last.rate, sorted({0, last.num_steps}))
    return max(search.plain, *found, key=lambda round: round.rate)


def expected_drafts(acceptance: Floats, num_drafts: NDArray[Any]) -> Floats:
    """Return the expected numbers of accepted drafts, a + a^2 + ... + a^g. `acceptance`: probability a that a draft is
    accepted if all drafts before it were accepted. `num_drafts`: number g of drafts, with the same shape."""
    inner = acceptance.clip(_NEVER, 1 - _NEVER)
    expected: Floats = -inner / (1 - inner) * np.expm1(num_drafts * np.log(inner))
    return expected


class _Search:
    """Search for the best round, with the tokens and seconds that each draft of each option adds."""

    def __init__(self, options: DraftOptions, cost: WorkCost, drafting: WorkCost, plain: WorkCost) -> None:
        contexts_B, num_rows = options.contexts_B, len(options.contexts_B)
        none_B, context = np.zeros(num_rows, np.int64), float(contexts_B.sum()) / max(num_rows, 1)
        self.plain = Round(none_B, none_B, 0, float(num_rows), 0.0, plain.plain_s(num_rows, context))
        """Round in which no sequence has drafts."""
        self._base_s = cost.plain_s(num_rows, context)
        """Seconds of a step that verifies drafts, without the time of the drafts."""
        keys_BK = np.minimum(options.draft_keys_BK, contexts_B[:, None])
        self._needs_step_BK = keys_BK > 0
        self._step_s = drafting.step_s
        self._draft_s_BK = self._needs_step_BK * (drafting.token_s + keys_BK * drafting.key_s)
        self._verify_s_B = cost.token_s + contexts_B * cost.pair_s
        self._seconds_BK1 = (self._draft_s_BK + self._verify_s_B[:, None])[:, :, None]
        self._rows_B1 = np.arange(num_rows)[:, None]
        self._options = options

    @cached_property
    def _added_BKG(self) -> Floats:
        added_BKG: Floats = np.repeat(self._options.acceptance_BK[:, :, None], MOST_DRAFTS, 2).cumprod(2)
        return added_BKG * (self._options.most_drafts_BK[:, :, None] >= _DRAFTS_G)

    def promising_steps(self, rate: float) -> Ints:
        """Return the numbers of draft steps with which a round can reach more than `rate` tokens per second. If no
        number can, the result is 0."""
        surplus_BKG = (self._added_BKG - rate * self._seconds_BK1) * self._needs_step_BK[:, :, None]
        surplus_BKG = surplus_BKG.clip(0.0)
        is_promising = surplus_BKG.sum(2).max(1).sum() > rate * self._step_s
        most_steps = int(surplus_BKG.any((0, 1)).sum()) if is_promising else 0
        return np.arange(most_steps + 1)

    def best_at(self, rate: float, num_steps_N: Ints) -> Round:
        """Return the round with the largest number of tokens per second, of those that have the largest surplus at
        `rate` tokens per second for one of the numbers of draft steps."""
        surplus_BKG = (self._added_BKG - rate * self._seconds_BK1).clip(0.0)
        num_BK = np.count_nonzero(surplus_BKG, 2)
        sums_BKG = np.zeros((*num_BK.shape, MOST_DRAFTS + 1))
        surplus_BKG.cumsum(2, out=sums_BKG[:, :, 1:])
        surplus_BKN = np.where(self._needs_step_BK[:, :, None], sums_BKG[:, :, num_steps_N], sums_BKG[:, :, -1:])
        chosen_BN = surplus_BKN.argmax(1)
        places = self._rows_B1, chosen_BN
        num_BN = np.where(self._needs_step_BK[places], np.minimum(num_BK[places], num_steps_N), num_BK[places])
        num_tokens_N = self.plain.num_tokens + (
            surplus_BKN.max(1) + rate * num_BN * self._seconds_BK1[places][:, :, 0]
        ).sum(0)
        num_steps_N = (num_BN * self._needs_step_BK[places]).max(0)
        draft_s_N = num_steps_N * self._step_s + (num_BN * self._draft_s_BK[places]).sum(0)
        verify_s_N = np.where(num_BN.any(0), self._base_s + self._verify_s_B @ num_BN, self.plain.verify_s)
        best = int((num_tokens_N / (draft_s_N + verify_s_N)).argmax())
        seconds = float(draft_s_N[best]), float(verify_s_N[best])
        return Round(num_BN[:, best], chosen_BN[:, best], int(num_steps_N[best]), float(num_tokens_N[best]), *seconds)

    def within(self, rate: float, most_steps: Sequence[int]) -> list[Round]:
        """Return the round with the largest surplus at `rate` tokens per second for each maximum number of draft steps.
        The last worthwhile draft of an option, and the tokens of all its drafts, are computed by logarithms, without an
        array over drafts."""
        acceptance_BK, least_BK = self._options.acceptance_BK, rate * self._seconds_BK1[:, :, 0]
        log_BK = np.log(acceptance_BK.clip(_NEVER, 1 - _NEVER))
        worthwhile_BK = np.ceil(np.log(least_BK.clip(_FREE)) / log_BK) - 1  # a^g > least
        most_BK = np.minimum(worthwhile_BK.clip(0.0), self._options.most_drafts_BK)
        rows_B, found = self._rows_B1[:, 0], []
        for most in most_steps:
            num_BK = np.where(self._needs_step_BK, np.minimum(most_BK, most), most_BK)
            tokens_BK = expected_drafts(acceptance_BK, num_BK)
            chosen_B = (tokens_BK - least_BK * num_BK).argmax(1)
            places = rows_B, chosen_B
            num_B = num_BK[places]
            num_steps = int((num_B * self._needs_step_BK[places]).max(initial=0.0))
            draft_s = num_steps * self._step_s + float(num_B @ self._draft_s_BK[places])
            verify_s = self._base_s + float(num_B @ self._verify_s_B) if num_B.any() else self.plain.verify_s
            num_tokens = self.plain.num_tokens + float(tokens_BK[places].sum())
            found.append(Round(num_B.astype(np.int64), chosen_B, num_steps, num_tokens, draft_s, verify_s))
        return found
