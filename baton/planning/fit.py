"""Fits the values of cost models to measurements, by least squares with non-negative coefficients.

Measurements are weighted by 1 / seconds. A relative error of 5 % therefore has the same weight for short and for long
prompts. All functions are pure.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.errors import InvalidArgumentError
from baton.planning.chain.wavefront import rank_seconds, work_of
from baton.planning.cost_model import CostModel, LinkModel, Protocol
from baton.planning.work_cost import StepWork, WorkCost


@dataclass(frozen=True)
class RankRow:
    """Measurement of one rank of a prefill chain: the time in which the rank computed a chunk of a prompt in all
    layers."""

    tokens: int
    """Number of tokens in the rank's chunk."""
    before: int
    """Number of keys before the chunk, from cached tokens and from earlier ranks."""
    is_last: bool
    """True for the last rank of a chain. Other ranks end as soon as their KV of the last layer can be sent."""
    seconds: float
    """Compute time of the rank in seconds, without waits."""


@dataclass(frozen=True)
class PrefillFit:
    """Fitted costs of prefill in seconds. A layer with C tokens and P pairs of a query and a key takes fixed_s +
    linear_s * C + pair_s * P seconds."""

    linear_s: float
    pair_s: float
    fixed_s: float
    residual: float
    """Largest relative deviation of a measurement from the fit."""


_RIDGE = 1e-13
"""Value that is added to the diagonal of normal equations, relative to the number of measurements. It avoids singular
equations if columns are equal."""


def fit_ranks(rows: Sequence[RankRow], known: CostModel, protocol: Protocol) -> PrefillFit:
    """Fit prefill costs to `rows`, which were measured while all ranks of a chain computed. Only the fields
    `num_layers` and `project_share` of `known` are used. Raises InvalidArgumentError if there are too few rows."""
    check_points(
        "rank_rows", "chunks", [(row.tokens * row.tokens + row.tokens * row.before, row.seconds) for row in rows]
    )
    chunks = np.array([[row.tokens] for row in rows], dtype=np.float64)
    before = np.array([[row.before] for row in rows], dtype=np.float64)
    is_last = np.array([[row.is_last] for row in rows])

    def column(linear_s: float, pair_s: float, fixed_s: float) -> NDArray[np.float64]:
        """Return the predicted seconds of all rows with these costs."""
        cost = CostModel(known.num_layers, linear_s, pair_s, 0, known.project_share, fixed_s=fixed_s)
        return rank_seconds(work_of(chunks, cost, protocol, before), is_last, cost, protocol)[:, 0]

    linear = column(1.0, 0.0, 0.0)
    columns = np.stack([linear, column(0.0, 1.0, 0.0), column(1.0, 0.0, 1.0) - linear], axis=1)
    (linear_s, pair_s, fixed_s), residual = fit_relative(columns, np.array([row.seconds for row in rows]))
    return PrefillFit(linear_s, pair_s, fixed_s, residual)


def fit_link(points: Sequence[tuple[float, float]]) -> LinkModel:
    """Fit latency and bandwidth of a link to measurements, which are (bytes, seconds) of single messages. A message
    takes latency_s + bytes / bandwidth. Raises InvalidArgumentError if there are too few points, or if times do not
    increase with the number of bytes."""
    num_bytes, seconds = check_points("points", "sizes", points)
    (latency_s, byte_s), _ = fit_relative(np.stack([np.ones_like(num_bytes), num_bytes], axis=1), seconds)
    if not byte_s > 0:
        raise InvalidArgumentError("points: larger messages took no longer: measure larger ones")
    return LinkModel(latency_s, 1 / byte_s)


def fit_work(steps: Sequence[tuple[StepWork, float]], known: WorkCost) -> tuple[WorkCost, float]:
    """Fit the cost of generation steps to measurements, which are pairs of a step's work and its seconds (above 0).
    Return the cost, and the largest relative deviation of a measured step from it.

    If no step compared a key with more than one query, the cost of an additional (query, key) pair cannot be determined
    from the steps. In this case `pair_s` of `known` is kept.
    """
    columns = np.array([work.columns for work, _ in steps], np.float64)
    return fit_columns(columns, np.array([seconds for _, seconds in steps]), known)


def fit_columns(
    columns: NDArray[np.float64],
    seconds: NDArray[np.float64],
    known: WorkCost,
    weights: NDArray[np.float64] | None = None,
) -> tuple[WorkCost, float]:
    """Fit the cost of generation steps, like `fit_work`. `columns` has the columns of each step's StepWork. `weights`
    are the weights of the steps' relative errors; None: all are 1."""
    num_told = 4 if columns[:, 3].any() else 3
    costs, residual = fit_relative(columns[:, :num_told], seconds, weights)
    return WorkCost(*costs, *([known.pair_s] if num_told == 3 else [])), residual


def check_points(name: str, what: str, points: Sequence[tuple[float, float]]) -> tuple[NDArray[np.float64], ...]:
    """Return the points, which are pairs (quantity, seconds), as two arrays. `what` names the quantity in error
    messages, for example "tokens". `name` identifies the points in these messages. Raises InvalidArgumentError for
    fewer than two different quantities, or for values that are not positive and finite."""
    if len({x for x, _ in points}) < 2:
        raise InvalidArgumentError(f"{name}: {len(points)} given, with fewer than 2 different {what}: measure more")
    if not all(0 < each < math.inf for point in points for each in point):
        raise InvalidArgumentError(
            f"{name}: {what} and seconds must be above 0, and finite: leave out what was not measured"
        )
    return tuple(np.array(points, dtype=np.float64).T)


def fit_relative(
    columns: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> tuple[list[float], float]:
    """Fit non-negative coefficients, so that the sum of coefficient times column approximates `seconds`. `columns` has
    the shape `[N, few]`, and `seconds` the shape `[N]`. Relative errors are multiplied by `weights`, which are above 0;
    None: all are 1. Return the coefficients, and the largest relative deviation.

    All subsets of the columns are tried, because there are only few. For each subset, an ordinary least-squares problem
    is solved by its normal equations, and the solution is refined once.
    """
    weights_N = np.ones(len(seconds)) if weights is None else weights
    scaled_NC = columns * (weights_N / seconds)[:, None]
    scale_C = np.maximum(np.abs(scaled_NC).max(axis=0), np.finfo(np.float64).tiny)  # no division by zero
    scaled_NC = scaled_NC / scale_C
    num_columns = columns.shape[1]
    subsets_SC = np.array(sorted(itertools.product((1.0, 0.0), repeat=num_columns), key=sum)[1:])
    normal_SCC = (scaled_NC.T @ scaled_NC) * subsets_SC[:, :, None] * subsets_SC[:, None, :]
    normal_SCC += np.eye(num_columns) * np.where(subsets_SC > 0, _RIDGE * len(seconds), 1.0)[:, None, :]
    solutions_SC = np.zeros_like(subsets_SC)
    errors_SN = np.tile(-weights_N, (len(subsets_SC), 1))
    for _ in range(2):
        gradients_SC = subsets_SC * -(errors_SN @ scaled_NC)
        solutions_SC += np.linalg.solve(normal_SCC, gradients_SC[:, :, None])[:, :, 0]
        errors_SN = solutions_SC @ scaled_NC.T - weights_N
    best, best_error = np.zeros(num_columns), weights_N
    for solution, error in zip(solutions_SC, errors_SN, strict=True):
        if (solution >= 0).all() and error @ error < best_error @ best_error * (1 - 1e-9):
            best, best_error = solution / scale_C, error
    return [float(value) for value in best], float(np.abs(best_error / weights_N).max())
