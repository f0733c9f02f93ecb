"""Settings and results of `baton evaluate`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """Policy, with the number of keys that it selects if this differs from the prepared selection."""

    policy: str
    budget: float | None = None
    """Fraction of a sequence's tokens that is selected, regardless of the keys' scores; None: as prepared."""
    alpha: float | None = None
    """Maximum distance of a selected key's score from the best score; None: as prepared."""
    selection: Path | None = None
    """Selection file of `baton prepare`; None: the one stored for the model."""
    pool: float | None = None
    """Fraction of a sequence's tokens that is kept; None: all tokens are kept."""
    eviction: str | None = None
    """Eviction policy of the pool; None without a pool."""

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
    """Amount of text to read."""

    contexts: tuple[int, ...]
    num_rows: int
    num_steps: int
    mass_every: int
    """Interval, in steps, at which the true attention on the selected keys is measured; 0: never."""
    has_needles: bool


@dataclass(frozen=True)
class Cell:
    """Results of one setting at one context length."""

    context: int
    policy: str
    setting: str
    """Name of the setting, including the policy."""
    budget: float | None
    alpha: float | None
    selection: str | None
    pool: float | None
    eviction: str | None
    is_exact: bool
    perplexity: float
    cost: float
    """Relative increase of the perplexity over full attention's."""
    cost_error: float | None
    """Standard error of `cost` over passages; None for one passage."""
    same_choice: float
    """Fraction of the steps whose likeliest token equals full attention's."""
    picked_share: float | None
    """Fraction of a sequence's tokens that is attended to, in selective layers; None without selective layers."""
    kv_share: float
    """KV bytes that attention reads, relative to full attention."""
    link_share: float
    """KV bytes that cross between host and device, relative to the bytes that full attention reads. Where keys are read
    in place, the bytes are counted but not copied."""
    home_share: float
    """Bytes of KV stored between steps, relative to full attention."""
    device_share: float
    """Bytes that count as device memory, including the data for selecting keys, relative to the bytes that full
    attention stores."""
    mass: float | None
    """Weight of true attention on the keys attended to; None if it was not requested."""
    num_found: int | None
    """Number of needles found; None if they were not requested."""
    step_ms: float
    """Median duration of a step in milliseconds."""
    chunks: tuple[float, ...]
    """Perplexities of consecutive groups of steps."""


@dataclass(frozen=True)
class Evaluation:
    """Results that `baton evaluate` prints."""

    title: str
    num_rows: int
    num_steps: int
    cells: tuple[Cell, ...]
