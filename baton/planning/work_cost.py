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
    """Work of one step, the sum of several steps, or the difference between steps."""

    num_tokens: int
    num_keys: int
    """Keys that are read, of all sequences."""
    num_pairs: int
    """Pairs of query and key that are compared."""
    num_steps: int = 1

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "StepWork") -> "StepWork":
        return StepWork(*map(operator.sub, vars(self).values(), vars(other).values()))

    @classmethod
    def plain(cls, num_rows: int, num_keys: int) -> "StepWork":
        """Return the work of a step that runs one token of each of `num_rows` sequences; `num_keys` is their sum."""
        return cls(num_rows, num_keys, num_keys)

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """Return the factors of the four costs of a WorkCost, in the order of its fields."""
        return self.num_steps, self.num_tokens, self.num_keys, self.num_pairs - self.num_keys


NO_WORK = StepWork(0, 0, 0, 0)


@dataclass(frozen=True)
class RowDrafts:
    """Drafts of one sequence in a round."""

    context: int
    """Keys that its last token attends to."""
    num_drafts: int
    draft_keys: int = 0
    """Keys of the sequence that a draft step attends to; 0: drafts take no step."""


def drafting_work(rows: Sequence[RowDrafts]) -> StepWork:
    """Return the work of the steps that make the drafts of some sequences, one draft of each sequence a step."""
    stepping = [row for row in rows if row.draft_keys and row.num_drafts]
    if not stepping:
        return NO_WORK
    num_keys = sum(min(row.draft_keys, row.context + step) for row in stepping for step in range(row.num_drafts))
    num_tokens = sum(row.num_drafts for row in stepping)
    return StepWork(num_tokens, num_keys, num_keys, max(row.num_drafts for row in stepping))


def verifying_work(rows: Sequence[RowDrafts]) -> StepWork:
    """Return the work of the step that verifies the drafts of some sequences; without drafts it is a plain step."""
    num_tokens = sum(1 + row.num_drafts for row in rows)
    num_pairs = sum((1 + row.num_drafts) * row.context for row in rows)
    return StepWork(num_tokens, sum(row.context for row in rows), num_pairs)


@dataclass(frozen=True)
class WorkCost:
    """Seconds that a step takes. Raises ConfigError for a number below 0, or one that is not finite."""

    step_s: float
    """Fixed seconds of any step, for reading the weights and for calls."""
    token_s: float
    """Seconds of multiplying a token with the matrices."""
    key_s: float
    """Seconds of reading a key and value, in all layers."""
    pair_s: float
    """Seconds of comparing a further query with a key that is read anyway, in all layers."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"cost: {name} = {value} is out of range: give a number of at least 0")

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of some steps."""
        steps, tokens, keys, pairs = work.columns
        return steps * self.step_s + tokens * self.token_s + keys * self.key_s + pairs * self.pair_s

    def plain_s(self, num_rows: float, context: float) -> float:
        """Return the predicted seconds of a step with one token of each of `num_rows` sequences of `context` tokens."""
        return self.step_s + num_rows * (self.token_s + context * self.key_s)
