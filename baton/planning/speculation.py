"""Chooses the number of draft tokens of each sequence in a round of speculative decoding, so that the expected number
of tokens per second is largest.

A round consists of some draft steps and one step that verifies the drafts (MagicDec; Sadhukhan et al., 2024, section
4). A draft is accepted with probability a if all drafts before it were accepted. With g drafts, a sequence gets

    1 + a + a^2 + ... + a^g = (1 - a^(g + 1)) / (1 - a)    expected tokens, including one from the model itself

(Leviathan, Kalman and Matias, 2023). Verifying drafts does not read more keys (`baton.planning.work_cost`). It
therefore costs little if reading keys takes most of a step's time. `generate_workers.speculation` calls `plan_round`
for each round. All functions are pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.limits import MAX_DRAFTS
from baton.planning.work_cost import WorkCost

MOST_DRAFTS = MAX_DRAFTS
"""Maximum number of drafts of one sequence in a round."""


@dataclass(frozen=True)
class Prospect:
    """One way to make drafts for a decoding sequence, with the values from which its benefit is predicted."""

    context: int
    """Number of keys that the sequence attends to, including the key of its last token."""
    acceptance: float
    """Probability that a draft is accepted if all drafts before it were accepted."""
    most_drafts: int
    """Maximum number of drafts that can be made for the sequence."""
    draft_keys: int
    """Number of keys that a draft step of the sequence attends to. 0 if drafts are made without a draft step."""


@dataclass(frozen=True)
class Round:
    """Plan for a round of speculative decoding (draft steps, and one step that verifies the drafts): the number of
    drafts of each sequence, the expected number of tokens, and the predicted durations of the steps."""

    num_drafts: tuple[int, ...]
    """Number of drafts of each sequence, in the order of the sequences. If all numbers are 0, the round is a normal
    decode step."""
    offers: tuple[int, ...]
    """Chosen prospect (option for making drafts) of each sequence, as an index into the sequence's list in the argument
    `rows` of `plan_round`. If the sequence gets no drafts, the entry is 0 and has no meaning."""
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


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return the expected number of tokens that a sequence gets from a round with `num_drafts` drafts. `acceptance` is
    the probability that a draft is accepted if all drafts before it were accepted."""
    return num_drafts + 1 if acceptance == 1 else (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)


def plan_round(rows: Sequence[Sequence[Prospect]], cost: WorkCost, draft_cost: WorkCost | None = None) -> Round:
    """Return the round with the largest expected number of tokens per second. Of equal rounds, return the one with
    fewer draft steps.

    `rows` holds one list of prospects (options for making drafts) for each sequence. The prospects of a sequence have
    the same `context`, and one of them is chosen. `cost` is the cost of steps of the model. `draft_cost` is the cost of
    draft steps if another model executes them; None: the same as `cost`.

    Each further draft of a sequence adds a fixed time, and at most as many expected tokens as the draft before it. At a
    rate of r tokens per second, a draft is worthwhile if it adds more tokens than r times its seconds. The surplus of a
    prospect is the number of tokens that its worthwhile drafts add, minus r times their seconds.

    For each possible number of draft steps, two operations are repeated until the rate does not increase (Dinkelbach,
    1967): the prospect with the largest surplus is chosen for each sequence, and r is set to the rate of the resulting
    round.
    """
    drafting = draft_cost or cost
    num_keys = sum(offers[0].context for offers in rows)
    plain_s = cost.step_s + len(rows) * cost.token_s + num_keys * cost.key_s
    best = Round((0,) * len(rows), (0,) * len(rows), float(len(rows)), 0.0, plain_s)
    priced = [[_Priced.of(each, cost, drafting) for each in offers] for offers in rows]
    most_steps = max((each.most_drafts for offers in rows for each in offers if each.draft_keys), default=0)
    for num_steps in range(most_steps + 1):
        while True:
            taken = [_most_gaining(offers, num_steps, best.rate) for offers in priced]
            mine = [(offers[place], num) for offers, (place, num) in zip(priced, taken, strict=True)]
            found = Round(
                tuple([num for _, num in taken]),
                tuple([place for place, _ in taken]),
                sum(expected_tokens(each.prospect.acceptance, num) for each, num in mine),
                num_steps * drafting.step_s + sum(num * each.draft_s for each, num in mine),
                plain_s + sum(num * each.verify_s for each, num in mine),
            )
            if found.rate <= best.rate * (1 + 1e-12):
                break
            best = found
    return best


@dataclass(frozen=True)
class _Priced:
    """Prospect (option for making drafts) with two costs of each of its drafts. `draft_s` is the time in seconds that
    the draft adds to a draft step, and `verify_s` the time that it adds to the step that verifies the drafts."""

    prospect: Prospect
    draft_s: float
    verify_s: float

    @classmethod
    def of(cls, prospect: Prospect, cost: WorkCost, drafting: WorkCost) -> "_Priced":
        num_keys = min(prospect.draft_keys, prospect.context)
        draft_s = drafting.token_s + num_keys * drafting.key_s if num_keys else 0.0
        return cls(prospect, draft_s, cost.token_s + prospect.context * cost.pair_s)

    def best(self, num_steps: int, rate: float) -> tuple[float, int]:
        """Return the largest surplus that this option for making drafts can reach, and the number of drafts with which
        it does.

        The surplus is the expected number of tokens from drafts, minus `rate` (tokens per second) times the seconds of
        the drafts. If the option needs draft steps, at most `num_steps` drafts are made.
        """
        prospect, seconds = self.prospect, self.draft_s + self.verify_s
        most = min(prospect.most_drafts, num_steps) if prospect.draft_keys else prospect.most_drafts
        num = min(most, _num_paying(prospect.acceptance, rate * seconds))
        return expected_tokens(prospect.acceptance, num) - 1 - rate * num * seconds, num


def _most_gaining(offers: Sequence[_Priced], num_steps: int, rate: float) -> tuple[int, int]:
    """Return the index of the prospect with the largest surplus (the first one if several are equal), and its number of
    drafts."""
    found = [each.best(num_steps, rate) for each in offers]
    place = max(range(len(found)), key=lambda at: found[at][0])
    num = found[place][1]
    return (place, num) if num else (0, 0)


def _num_paying(acceptance: float, least: float) -> int:
    """Return the number of leading drafts that each add at least `least` expected tokens."""
    if acceptance <= least:
        return 0
    return MOST_DRAFTS if acceptance >= 1 or least <= 0 else int(math.log(least) / math.log(acceptance))
