"""What `baton plan` predicts, for its tables and its plot."""

from dataclasses import dataclass

from planning.study.chips import Chip
from planning.study.roofline import ServedModel


@dataclass(frozen=True)
class StepCell:
    """The prediction for one batch at one context length."""

    batch: int
    context: int
    kv_bytes: float
    total_bytes: float
    """Bytes of weights and KV together."""
    fits: bool
    step_s: float
    attention_s: float
    linear_s: float
    other_s: float
    bound: str
    """The largest part of the step: kv, weights, compute, or calls."""
    tokens_s: float
    """Tokens a second of all rows together."""


@dataclass(frozen=True)
class StepForecast:
    """Everything that `baton plan` prints."""

    title: str
    model: ServedModel
    chip: Chip
    num_chips: int
    critical_batch: float
    largest_batch: dict[int, int]
    """Rows that fit into memory, by context length."""
    cells: tuple[StepCell, ...]
