"""Fits the values of cost models to measurements, by least squares with non-negative coefficients.

Measurements are weighted by 1 / seconds. A relative error of 5 % therefore has the same weight for short and for long
prompts. All functions are pure.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

_RIDGE = 1e-13
"""Value that is added to the diagonal of normal equations, relative to the number of measurements. It avoids singular
equations if columns are equal."""


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
    subsets_SC = np.array(sorted(itertools.product((1.0, 0.0), repeat=num_columns), key=sum))
    normal_SCC = (scaled_NC.T @ scaled_NC) * subsets_SC[:, :, None] * subsets_SC[:, None, :]
    normal_SCC += np.eye(num_columns) * np.where(subsets_SC > 0, _RIDGE * len(seconds), 1.0)[:, None, :]
    solutions_SC = np.zeros_like(subsets_SC)
    errors_SN = np.tile(-weights_N, (len(subsets_SC), 1))
    for _ in range(2):
        gradients_SC = subsets_SC * -(errors_SN @ scaled_NC)
        solutions_SC += np.linalg.solve(normal_SCC, gradients_SC[:, :, None])[:, :, 0]
        errors_SN = solutions_SC @ scaled_NC.T - weights_N
    squares_S = np.where((solutions_SC >= 0).all(axis=1), (errors_SN**2).sum(axis=1), np.inf)
    best = (squares_S <= squares_S.min() * (1 + 1e-9)).argmax()  # of subsets that fit alike the smallest
    return (solutions_SC[best] / scale_C).tolist(), float(np.abs(errors_SN[best] / weights_N).max())
