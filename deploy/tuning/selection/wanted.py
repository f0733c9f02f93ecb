"""Requested values of `baton prepare`, and the options that select the model for it and for `baton evaluate`."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from baton.settings.paths import cache_folder
from baton.types import DTYPES, QUANTIZATIONS


@dataclass(frozen=True)
class Wanted:
    """Values of the options of `baton prepare`."""

    kinds: tuple[str, ...]
    ratios: tuple[float, ...]
    """Fractions of a head's columns that are kept."""
    reach: int
    """Bases must be valid for positions below this number; 0: the model's context length."""
    lookahead: int
    context: int
    """Number of tokens of each passage before the first step."""
    num_rows: int
    """Number of passages, including the one that bases are fitted to."""
    num_steps: int
    most_cost: float
    """Allowed relative increase of perplexity."""
    by_hand: tuple[float, float] | None
    """The given values of alpha and most_share; None: `baton prepare` searches for them."""
    num_first: int
    num_last: int
    free_keys: int


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model is loaded and run."""
    group = parser.add_argument_group("model")
    group.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="(default: %(default)s)")
    group.add_argument(
        "--quantization", default="none", choices=QUANTIZATIONS, help="format of the weights (default: none)"
    )
    group.add_argument("--cache", type=Path, default=cache_folder(), help="folder for converted models")
    group.add_argument("--threads", type=int, default=0, help="number of threads; 0: one for each core (default: 0)")
