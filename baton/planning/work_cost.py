"""Cost of a generation step, by the tokens that it computes, the keys that it reads and the pairs that it compares.

A step of T tokens that reads S keys, and compares E pairs of query and key beyond one query a key, takes about

    step + T token + S key + E pair

A plain step of B sequences has T = B and E = 0. Verifying g drafts of a sequence of S keys adds g to T and g S to E. A
draft step has few keys. The four numbers follow from a model's bytes and FLOPs (`baton.planning.hardware`), are
measured by `baton calibrate --generate` (`baton.planning.step_times`), and are learnt while steps run
(`baton.planning.step_costs`). Pure.
"""

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from baton.errors import ConfigError


@dataclass(frozen=True)
class StepWork:
    """Work of one step, of several steps in total, or of the difference between steps."""

    num_tokens: int
    num_keys: int
    """Total number of keys of all sequences that are read."""
    num_pairs: int
    """Number of query-key pairs that are compared."""
    num_steps: int = 1

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "StepWork") -> "StepWork":
        return StepWork(*map(operator.sub, vars(self).values(), vars(other).values()))

    @classmethod
    def plain(cls, num_rows: int, num_keys: int) -> "StepWork":
        """Return the work of a step that runs one token of each of `num_rows` sequences. `num_keys` is the total number
        of their keys."""
        return cls(num_rows, num_keys, num_keys)

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """Return the numbers by which the four costs of a WorkCost are multiplied, in the order of its fields."""
        return self.num_steps, self.num_tokens, self.num_keys, self.num_pairs - self.num_keys


NO_WORK = StepWork(0, 0, 0, 0)


@dataclass(frozen=True)
class RowDrafts:
    """Drafts of one sequence in a round."""

    context: int
    """Number of keys that the last token of the sequence attends to."""
    num_drafts: int
    draft_keys: int = 0
    """Number of keys of the sequence that a draft step attends to; 0: making drafts does not need a step."""


def drafting_work(rows: Sequence[RowDrafts]) -> StepWork:
    """Return the work of the steps that make the drafts of some sequences. Each step makes one draft of
    each sequence."""
    stepping = [row for row in rows if row.draft_keys and row.num_drafts]
    if not stepping:
        return NO_WORK
    num_keys = sum(min(row.draft_keys, row.context + step) for row in stepping for step in range(row.num_drafts))
    num_tokens = sum(row.num_drafts for row in stepping)
    return StepWork(num_tokens, num_keys, num_keys, max(row.num_drafts for row in stepping))


def verifying_work(rows: Sequence[RowDrafts]) -> StepWork:
    """Return the work of the step that verifies the drafts of some sequences. Without drafts it is a plain step."""
    num_tokens = sum(1 + row.num_drafts for row in rows)
    num_pairs = sum((1 + row.num_drafts) * row.context for row in rows)
    return StepWork(num_tokens, sum(row.context for row in rows), num_pairs)


@dataclass(frozen=True)
class WorkCost:
    """Cost of steps in seconds. Raises ConfigError if a number is negative or not finite."""

    step_s: float
    """Fixed seconds of any step, for reading the weights and for function calls."""
    token_s: float
    """Seconds to multiply a token with the matrices."""
    key_s: float
    """Seconds to read a key and its value in all layers."""
    pair_s: float
    """Seconds to compare a further query with a key that is read in any case, in all layers."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"cost: {name} = {value} is out of range: give a number of at least 0")

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of some steps."""
        steps, tokens, keys, pairs = work.columns
        return steps * self.step_s + tokens * self.token_s + keys * self.key_s + pairs * self.pair_s

    def plain_s(self, num_rows: float, context: float) -> float:
        """Return the predicted seconds of a step with one token of each of `num_rows` sequences, each of which has
        `context` tokens."""
        return self.step_s + num_rows * (self.token_s + context * self.key_s)
