"""What `baton prepare` is asked for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """What the options ask for."""

    kinds: tuple[str, ...]
    ratios: tuple[float, ...]
    """Columns kept, as a part of the head's."""
    reach: int
    """Positions below which bases shall hold; 0: the model's context."""
    lookahead: int
    context: int
    """Tokens of each passage before the steps."""
    num_rows: int
    """Passages, the one that is fitted to included."""
    num_steps: int
    most_cost: float
    """That perplexity may rise, as a part."""
    by_hand: tuple[float, float] | None
    """alpha and most_share; None: to be found."""
    num_first: int
    num_last: int
    free_keys: int
