"""Settings and results of `baton evaluate`, for its reading, its tables and its plot."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """A policy, and the number of keys that it chooses if this differs from the prepared one."""

    policy: str
    budget: float | None = None
    """Fraction of a sequence's tokens that is chosen, regardless of their keys' scores; None: as prepared."""
    alpha: float | None = None
    """How close to the best score a chosen key must come; None: as prepared."""
    selection: Path | None = None
    """File that `baton prepare` wrote; None: the file that it wrote for the model."""
    pool: float | None = None
    """Fraction of a row's tokens that is kept; None: all are."""
    eviction: str | None = None
    """Way to evict tokens from a pool; None without a pool."""

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
    """How much text is read."""

    contexts: tuple[int, ...]
    num_rows: int
    num_steps: int
    mass_every: int
    """Number of steps between two weighings of the keys; 0: keys are never weighed."""
    has_needles: bool


@dataclass(frozen=True)
class Cell:
    """Results of one setting at one context length."""

    context: int
    policy: str
    setting: str
    """Name of the setting, the policy's included."""
    budget: float | None
    alpha: float | None
    selection: str | None
    pool: float | None
    eviction: str | None
    is_exact: bool
    perplexity: float
    cost: float
    """Relative rise of perplexity above full attention's."""
    cost_error: float | None
    """Standard error of `cost` over rows; None for one row."""
    same_choice: float
    """Fraction of the steps whose likeliest token is full attention's."""
    picked_share: float | None
    """Fraction of a row's tokens that is attended to, in layers that choose; None where none does."""
    kv_share: float
    """KV bytes that attention read, as a fraction of full attention's."""
    link_share: float
    """KV bytes that cross between host and device, copied or (where keys are read in place) counted, as a fraction of
    the bytes that full attention reads."""
    home_share: float
    """Bytes that store KV between steps, as a fraction of what full attention stores."""
    device_share: float
    """Memory that counts as the device's, what keys are chosen by included, as a fraction of full attention's."""
    mass: float | None
    """Weight of true attention on the keys attended to; None where it was not requested."""
    num_found: int | None
    """Number of needles found; None where they were not requested."""
    step_ms: float
    """Median milliseconds of a step."""
    chunks: tuple[float, ...]
    """Perplexity of consecutive parts of the steps."""


@dataclass(frozen=True)
class Evaluation:
    """Everything that `baton evaluate` prints."""

    title: str
    num_rows: int
    num_steps: int
    cells: tuple[Cell, ...]
