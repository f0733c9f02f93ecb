"""From measurements to a cost model's numbers: least squares with no negative coefficient.

Points are weighed by 1 / seconds: a short prompt that is 5 % off counts as much as a long one. Pure.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.errors import InvalidArgumentError
from planning.cost_model import Kernel, Link


@dataclass(frozen=True)
class PrefillFit:
    """One rank's prefill of C tokens, a layer: fixed_s + linear_s C + pair_s C^2 (causal kernels: C^2 / 2)."""

    linear_s: float
    pair_s: float
    fixed_s: float
    residual: float
    """The largest deviation of a point from the fit, as a fraction of its seconds."""


@dataclass(frozen=True)
class LinkFit:
    """A message of B bytes: latency_s + B / bandwidth."""

    link: Link
    residual: float
    """The largest deviation of a point from the fit, as a fraction of its seconds."""


def fit_prefill(points: Sequence[tuple[float, float]], num_layers: int, kernel: Kernel) -> PrefillFit:
    """From (tokens, seconds) of whole prompts on one rank, all layers. Raises InvalidArgumentError for too few."""
    tokens, seconds = _points("points", "token counts", points)
    pairs = tokens**2 * (1.0 if kernel is Kernel.DENSE else 0.5)
    columns = num_layers * np.stack([tokens, pairs, np.ones_like(tokens)], axis=1)
    (linear_s, pair_s, fixed_s), residual = _solve(columns, seconds)
    return PrefillFit(linear_s, pair_s, fixed_s, residual)


def fit_link(points: Sequence[tuple[float, float]]) -> LinkFit:
    """From (bytes, seconds) of single messages. Raises InvalidArgumentError for too few, or times that do not grow."""
    num_bytes, seconds = _points("points", "sizes", points)
    (latency_s, byte_s), residual = _solve(np.stack([np.ones_like(num_bytes), num_bytes], axis=1), seconds)
    if not byte_s > 0:
        raise InvalidArgumentError("points: larger messages took no longer: measure larger ones")
    return LinkFit(Link(latency_s, 1 / byte_s), residual)


def _points(name: str, what: str, points: Sequence[tuple[float, float]]) -> tuple[NDArray[np.float64], ...]:
    if len({x for x, _ in points}) < 2:
        raise InvalidArgumentError(f"{name}: {len(points)} given, with fewer than 2 different {what}: measure more")
    if any(not (x > 0 and seconds > 0) for x, seconds in points):
        raise InvalidArgumentError(f"{name}: {what} and seconds must be above 0: leave out what was not measured")
    return tuple(np.array(points, dtype=np.float64).T)


def _solve(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[list[float], float]:
    """Coefficients of the best combination of columns, none negative, and the largest relative residual.

    With three unknowns at most, the best of all subsets whose plain least squares is non-negative is exact.
    """
    scaled = columns / seconds[:, None]
    scale = np.abs(scaled).max(axis=0)
    num_columns = columns.shape[1]
    best, best_error = np.zeros(num_columns), np.ones(len(seconds))
    for size in range(1, num_columns + 1):
        for chosen in itertools.combinations(range(num_columns), size):
            solution = np.linalg.lstsq(scaled[:, chosen] / scale[list(chosen)], np.ones(len(seconds)), rcond=None)[0]
            error = scaled[:, chosen] @ (solution / scale[list(chosen)]) - 1
            if (solution >= 0).all() and error @ error < best_error @ best_error * (1 - 1e-9):
                best = np.zeros(num_columns)
                best[list(chosen)] = solution / scale[list(chosen)]
                best_error = error
    return [float(value) for value in best], float(np.abs(best_error).max())
