"""Values that the user requests from `baton prepare`, and the options that select a model. `baton evaluate` has the
same options."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from baton.settings.paths import cache_folder
from baton.types import DTYPES, WEIGHT_FORMS


@dataclass(frozen=True)
class Wanted:
    """Values of the command-line options of `baton prepare`."""

    kinds: tuple[str, ...]
    ratios: tuple[float, ...]
    """Fractions of a head's columns (elements of a key) that a basis keeps. A basis projects queries and keys to fewer
    columns, from which scores are estimated. Each fraction is tried."""
    reach: int
    """Number of token positions for which bases must be valid: [0, `reach`). A basis is a projection of queries and
    keys to a few columns, from which scores are estimated. 0 selects the model's context length."""
    lookahead: int
    context: int
    """Number of tokens of each passage that are prefilled before the first step."""
    num_rows: int
    """Number of passages into which the text is divided. Bases (projections of queries and keys to a few columns) are
    fitted to the first passage and compared on the second. Selections are measured on the others."""
    num_steps: int
    most_cost: float
    """Maximum relative increase of perplexity that a selection may cause, for example 0.02."""
    by_hand: tuple[float, float] | None
    """Pair (alpha, most_share) that the user gave: the maximum distance of a selected key's score from the best score,
    and the maximum fraction of keys that are selected by score. None: `baton prepare` searches for the values."""
    num_first: int
    num_last: int
    free_keys: int


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a model and determine how it is loaded and run."""
    group = parser.add_argument_group("model")
    text = "data type of weights, activations and KV (default: %(default)s)"
    group.add_argument("--dtype", default="bfloat16", choices=DTYPES, help=text)
    text = "form of weights in memory (default: stored)"
    group.add_argument("--weights", default="stored", choices=WEIGHT_FORMS, help=text)
    text = "folder for converted models (default: %(default)s)"
    group.add_argument("--cache", type=Path, default=cache_folder(), help=text)
    text = "number of compute threads; 0: one for each core (default: 0)"
    group.add_argument("--threads", type=int, default=0, help=text)
