"""What `baton evaluate` is asked for, and what it finds: for its reading, its tables and its plot."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """A policy, and how many keys it chooses where that is not as prepared."""

    policy: str
    budget: float | None = None
    """So large a part of a row's tokens, whatever their keys' scores are."""
    alpha: float | None = None
    """Keys that come this close to the best score."""
    selection: Path | None = None
    """What `baton prepare` wrote; None: where it wrote for the model."""
    pool: float | None = None
    """So large a part of a row's tokens is kept; None: all are."""
    eviction: str | None = None
    """Who goes, where they are not."""

    def __str__(self) -> str:
        parts = [self.policy]
        if self.selection is not None:
            parts.append(self.selection.stem)
        if self.budget is not None:
            parts.append(f"{self.budget:g}")
        if self.alpha is not None:
            parts.append(f"alpha {self.alpha:g}")
        if self.pool is not None:
            parts.append(f"pool {self.pool:g} {self.eviction}")
        return " ".join(parts)


@dataclass(frozen=True)
class Size:
    """How much is read."""

    contexts: tuple[int, ...]
    num_rows: int
    num_steps: int
    mass_every: int
    """Steps from one at which keys are weighed to the next; 0: never."""
    has_needles: bool


@dataclass(frozen=True)
class Cell:
    """One setting at one context length."""

    context: int
    policy: str
    setting: str
    """With the policy's name."""
    budget: float | None
    alpha: float | None
    selection: str | None
    pool: float | None
    eviction: str | None
    is_exact: bool
    perplexity: float
    cost: float
    """By what part that is above full attention's."""
    cost_error: float | None
    """Its standard error, over rows; None for one row."""
    same_choice: float
    """Part of the steps that choose as full attention does."""
    picked_share: float | None
    """Of a row's tokens, in layers that choose; None where none does."""
    kv_share: float
    """KV bytes that attention read, of full attention's."""
    link_share: float
    """KV bytes that cross between host and device, copied or (where keys are read in place) counted, of the same."""
    home_share: float
    """Memory in which KV lives between steps, of what full attention's takes."""
    device_share: float
    """Memory that counts as the device's, what the policy chooses by included, of the same."""
    mass: float | None
    """Of true attention, on the picked keys; None where it was not asked for."""
    num_found: int | None
    """Needles found; None where they were not asked for."""
    step_ms: float
    """Median."""
    chunks: tuple[float, ...]
    """Perplexity of consecutive parts of the steps."""


@dataclass(frozen=True)
class Evaluation:
    """All that is printed."""

    title: str
    num_rows: int
    num_steps: int
    cells: tuple[Cell, ...]
