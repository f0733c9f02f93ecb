"""How many tokens to draft for each row of a round of speculative decoding: as many as bring most tokens a second.

A round is some draft steps and one step that verifies (MagicDec; Sadhukhan et al., 2024, section 4). A row of which
each draft is accepted with probability a, until the first that is not, gets from g drafts

    1 + a + a^2 + ... + a^g = (1 - a^(g + 1)) / (1 - a)    tokens, one of them the model's own

(Leviathan, Kalman and Matias, 2023). Verifying drafts reads no further keys (`planning.work_cost`), so it costs
little where reading keys is what takes time. `generate_workers.speculation`
asks for the drafts of each round. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.sampling_params import MAX_DRAFTS
from planning.work_cost import WorkCost

MOST_DRAFTS = MAX_DRAFTS
"""Most drafts of a row in a round."""


@dataclass(frozen=True)
class Prospect:
    """A row that decodes, before a round."""

    context: int
    """Keys that the row attends to, its last token's own included."""
    acceptance: float
    """Probability that a draft is accepted when all before it were."""
    most_drafts: int
    """Most drafts that the row can have."""
    draft_keys: int
    """Keys that a draft step attends to; 0 where drafts take no step."""


@dataclass(frozen=True)
class Round:
    """Drafts of each row for a round, and what is expected of it."""

    num_drafts: tuple[int, ...]
    """Drafts of each row, in the rows' order; all 0: a plain step."""
    num_tokens: float
    """Expected tokens of all rows."""
    draft_s: float
    """Predicted seconds of the draft steps."""
    verify_s: float
    """Predicted seconds of the step that verifies."""

    @property
    def rate(self) -> float:
        """Return the expected tokens a second."""
        return self.num_tokens / (self.draft_s + self.verify_s)


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return the tokens that a row gets from a round with so many drafts, on average."""
    return num_drafts + 1 if acceptance == 1 else (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)


def plan_round(rows: Sequence[Prospect], cost: WorkCost) -> Round:
    """Return the round with the most expected tokens a second; of equal rounds the one with fewer draft steps.

    For a given number of draft steps, each further draft of a row adds its share of the expected tokens, which falls
    with every draft, and a fixed time. At a rate of r tokens a second a draft pays while it adds more than r times its
    seconds; the best rate is found by doing so at the rate reached before (Dinkelbach, 1967).
    """
    num_keys = sum(row.context for row in rows)
    plain_s = cost.step_s + len(rows) * cost.token_s + num_keys * cost.key_s
    best = Round((0,) * len(rows), float(len(rows)), 0.0, plain_s)
    most_steps = max((row.most_drafts for row in rows if row.draft_keys), default=0)
    verify_s = [cost.token_s + row.context * cost.pair_s for row in rows]
    draft_s = [cost.token_s + min(row.draft_keys, row.context) * cost.key_s if row.draft_keys else 0.0 for row in rows]
    for num_steps in range(most_steps + 1):
        most = [min(row.most_drafts, num_steps) if row.draft_keys else row.most_drafts for row in rows]
        while True:
            seconds = [verify + draft for verify, draft in zip(verify_s, draft_s, strict=True)]
            paying = [_num_paying(row.acceptance, best.rate * each) for row, each in zip(rows, seconds, strict=True)]
            numbers = tuple(map(min, most, paying))
            found = Round(
                numbers,
                sum(expected_tokens(row.acceptance, num) for row, num in zip(rows, numbers, strict=True)),
                num_steps * cost.step_s + sum(num * each for num, each in zip(numbers, draft_s, strict=True)),
                plain_s + sum(num * each for num, each in zip(numbers, verify_s, strict=True)),
            )
            if found.rate <= best.rate * (1 + 1e-12):
                break
            best = found
    return best


def _num_paying(acceptance: float, least: float) -> int:
    """Return how many drafts each add at least so many expected tokens."""
    if acceptance <= least:
        return 0
    return MOST_DRAFTS if acceptance >= 1 or least <= 0 else int(math.log(least) / math.log(acceptance))
