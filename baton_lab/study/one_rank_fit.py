"""Fits prefill costs to measured times in which one rank prefills whole prompts, such as those in a paper's table.
Does no I/O."""

from collections.abc import Sequence

import numpy as np

from baton.planning.cost_model import Kernel
from baton.planning.fit import PrefillFit, check_points, fit_relative


def fit_prefill(points: Sequence[tuple[float, float]], num_layers: int, kernel: Kernel) -> PrefillFit:
    """Fit prefill costs to measurements of whole prompts on one rank, as (tokens, seconds). Raises InvalidArgumentError
    if there are too few points."""
    tokens, seconds = check_points("points", "token counts", points)
    pairs = tokens**2 * kernel.own_part
    columns = num_layers * np.stack([tokens, pairs, np.ones_like(tokens)], axis=1)
    (linear_s, pair_s, fixed_s), residual = fit_relative(columns, seconds)
    return PrefillFit(linear_s, pair_s, fixed_s, residual)
