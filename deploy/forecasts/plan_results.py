"""What `baton plan` predicts, for its tables and its plot."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planning.study.chips import Chip
    from planning.study.roofline import ServedModel


@dataclass(frozen=True)
class Cell:
    """One batch at one context length."""

    batch: int
    context: int
    kv_bytes: float
    total_bytes: float
    """With the weights."""
    fits: bool
    step_s: float
    attention_s: float
    linear_s: float
    other_s: float
    bound: str
    """kv, weights, compute, or calls: the largest part."""
    tokens_s: float
    """All rows together."""


@dataclass(frozen=True)
class Plan:
    """All that is printed."""

    title: str
    model: "ServedModel"
    chip: "Chip"
    num_chips: int
    critical_batch: float
    largest_batch: dict[int, int]
    """By context length."""
    cells: tuple[Cell, ...]
