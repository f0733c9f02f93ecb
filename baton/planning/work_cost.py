"""Cost of a generation step, computed from the number of its tokens, the keys that it reads, and the pairs of a query
and a key that it compares.

Let a step have T tokens, read S keys and compare S + E pairs of a query and a key. Each key is compared with at least
one query, so E is the number of additional pairs. The step takes about

    step + T token + S key + E pair

seconds. A step without drafts has T = B for B sequences, and E = 0. Verifying g drafts of a sequence with S keys adds g
to T and g S to E. A draft step reads few keys.

The four coefficients are derived from a model's bytes and FLOPs (`baton.planning.hardware`), and updated while steps
run (`baton.planning.step_cost`). All functions are pure.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True)
class StepWork:
    """Amount of work of generation steps: one step, the sum of several steps, or the difference between steps."""

    num_tokens: int
    num_keys: int
    """Number of keys that are read, summed over all sequences."""
    num_pairs: int
    """Number of pairs of a query and a key that are compared, summed over all sequences."""
    num_steps: int = 1

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "StepWork") -> "StepWork":
        return StepWork(*map(operator.sub, vars(self).values(), vars(other).values()))

    @classmethod
    def plain(cls, num_rows: int, num_keys: int) -> "StepWork":
        """Return the work of a step without drafts. The step computes one token of each of `num_rows` sequences, which
        have `num_keys` keys in total."""
        return cls(num_rows, num_keys, num_keys)

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """Return the four quantities of this work: steps, tokens, keys, and additional pairs (pairs of a query and a
        key, minus one pair for each key). The fields of a WorkCost are the costs of these quantities, in the same
        order. The sum of the products is the predicted duration."""
        return self.num_steps, self.num_tokens, self.num_keys, self.num_pairs - self.num_keys


NO_WORK = StepWork(0, 0, 0, 0)


@dataclass(frozen=True)
class RowDrafts:
    """Number of drafts of one sequence in a round of speculative decoding (draft steps, and one step that verifies the
    drafts), with the numbers of keys that these steps read."""

    context: int
    """Number of keys that the last token of the sequence attends to."""
    num_drafts: int
    draft_keys: int = 0
    """Number of the sequence's keys that a draft step attends to. 0 if drafts are made without a draft step."""


def drafting_work(rows: Sequence[RowDrafts]) -> StepWork:
    """Return the total work of the draft steps that make the drafts of the given sequences. A draft step makes one
    draft for each sequence that still needs one."""
    stepping = [row for row in rows if row.draft_keys and row.num_drafts]
    if not stepping:
        return NO_WORK
    num_keys = sum(
        row.num_drafts * row.draft_keys
        if row.draft_keys <= row.context
        else sum(min(row.draft_keys, row.context + step) for step in range(row.num_drafts))
        for row in stepping
    )
    num_tokens = sum(row.num_drafts for row in stepping)
    return StepWork(num_tokens, num_keys, num_keys, max(row.num_drafts for row in stepping))


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return the expected number of tokens that a sequence gets from a round with `num_drafts` drafts. `acceptance` is
    the probability that a draft is accepted if all drafts before it were accepted."""
    return num_drafts + 1 if acceptance == 1 else (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)


@dataclass(frozen=True)
class WorkCost:
    """Coefficients for the cost of generation steps, in seconds. Raises ConfigError if a value is negative or not
    finite."""

    step_s: float
    """Fixed time of a step in seconds, for reading the weights and for function calls."""
    token_s: float
    """Time in seconds of the matrix products for one token, summed over all layers."""
    key_s: float
    """Time in seconds to read one token's key and value, summed over all layers."""
    pair_s: float
    """Time in seconds of one additional pair of a query and a key, summed over all layers. Additional pairs arise when
    several queries are compared with the same key: the first pair of each key is included in `key_s`."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"cost: {name} = {value} is out of range: give a number of at least 0")

    def seconds(self, work: StepWork) -> float:
        """Return the predicted duration in seconds of the given work."""
        steps, tokens, keys, pairs = work.columns
        return steps * self.step_s + tokens * self.token_s + keys * self.key_s + pairs * self.pair_s

    def plain_s(self, num_rows: float, context: float) -> float:
        """Return the predicted duration in seconds of a step without drafts. The step computes one token of each of
        `num_rows` sequences, which have `context` tokens each."""
        return self.step_s + num_rows * (self.token_s + context * self.key_s)
