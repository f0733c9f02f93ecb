"""What `baton prepare` is asked for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """What the options of `baton prepare` ask for."""

    kinds: tuple[str, ...]
    ratios: tuple[float, ...]
    """Columns of a head that are kept, as fractions of all."""
    reach: int
    """Positions below which bases must hold; 0: the model's context."""
    lookahead: int
    context: int
    """Tokens of each passage before the steps."""
    num_rows: int
    """Number of passages, the one that is fitted to included."""
    num_steps: int
    most_cost: float
    """Relative rise of perplexity that is allowed."""
    by_hand: tuple[float, float] | None
    """alpha and most_share as given; None: they are searched."""
    num_first: int
    num_last: int
    free_keys: int
