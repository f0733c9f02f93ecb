"""Data classes with the settings and the results of `baton evaluate`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """Residency policy to evaluate, with its parameters. Parameters that are not None replace those in the file that
    `baton prepare` wrote for the model."""

    policy: str
    budget: float | None = None
    """Fraction of a sequence's keys to select, regardless of the keys' scores. None: the parameters in the selection
    file determine the number of selected keys."""
    alpha: float | None = None
    """Maximum distance of a key's score from the best score. The keys within this distance are counted to determine how
    many keys are selected. None: the value in the selection file."""
    selection: Path | None = None
    """Path of a selection file that `baton prepare` wrote. None: the file stored for the model."""
    pool: float | None = None
    """Size of the pool: limit on kept KV, as a fraction of a sequence's tokens. None: no pool, all KV is kept."""
    eviction: str | None = None
    """Name of the policy that evicts KV from the pool (the limit on kept KV); None without a pool."""

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
    """Amount of text that an evaluation reads."""

    contexts: tuple[int, ...]
    num_rows: int
    num_steps: int
    mass_every: int
    """Number of steps from one measurement of `Cell.mass` to the next. `Cell.mass` is the fraction of full attention's
    weights that the selected keys get. 0: it is not measured."""
    has_needles: bool


@dataclass(frozen=True)
class Cell:
    """Results of one setting (residency policy with its parameters) at one context length."""

    context: int
    policy: str
    setting: str
    """Text that names the setting: the policy and its parameters."""
    budget: float | None
    alpha: float | None
    selection: str | None
    pool: float | None
    eviction: str | None
    is_exact: bool
    perplexity: float
    cost: float
    """Increase of the perplexity compared with full attention, as a fraction of full attention's perplexity."""
    cost_error: float | None
    """Standard error of `cost` over the passages; None if there is only one passage."""
    same_choice: float
    """Fraction of steps in which the most likely token is the same as with full attention."""
    picked_share: float | None
    """Fraction of a sequence's tokens that are attended to in layers that select keys; None if no layer selects
    keys."""
    kv_share: float
    """KV bytes that attention reads, as a fraction of those that full attention reads."""
    link_share: float
    """KV bytes that are transferred between host and device, as a fraction of the bytes that full attention reads. If
    keys are read from host memory without a copy, their bytes are counted too."""
    home_share: float
    """KV bytes that are stored between steps, as a fraction of those that full attention stores."""
    device_share: float
    """Bytes of device memory, including the data that selects keys, as a fraction of the KV bytes that full attention
    stores."""
    mass: float | None
    """Sum of the weights that full attention gives to the selected keys, as a fraction of all weights; None if not
    measured."""
    num_found: int | None
    """Number of needles (facts hidden in a passage) whose answer the model predicted; None if the needle test was not
    requested."""
    step_ms: float
    """Median duration of a step in milliseconds."""
    chunks: tuple[float, ...]
    """Perplexities of consecutive groups of steps, in the order of the text."""


@dataclass(frozen=True)
class Evaluation:
    """Results that `baton evaluate` prints."""

    title: str
    num_rows: int
    num_steps: int
    cells: tuple[Cell, ...]
