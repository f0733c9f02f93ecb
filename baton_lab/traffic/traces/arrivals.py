"""Arrival processes: arrival times of requests, independent of earlier answers. Pure.

Used by `baton_lab.traffic.traces.generators` for simulated traffic, and by `baton bench` for real traffic.
"""

import numpy as np
from numpy.typing import NDArray


def poisson(rate: float, seconds: float, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the arrival times of a Poisson process with `rate` arrivals per second in [0, seconds), ascending."""
    return np.sort(generator.uniform(0.0, seconds, generator.poisson(rate * seconds)))


def gamma_arrivals(rate: float, shape: float, num: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the first `num` arrival times, ascending, of a process with gamma distributed gaps of mean 1 / rate.

    The squared coefficient of variation of the gaps is 1 / shape. A shape of 1 is a Poisson process; with a smaller
    shape requests arrive in bursts, with a larger one more evenly.
    """
    return np.cumsum(generator.gamma(shape, 1 / (shape * rate), num))


def gamma_arrivals_until(
    seconds: float, rate: float, shape: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return the arrival times in [0, seconds) of the process that `gamma_arrivals` describes."""
    num_drawn = int(rate * seconds * 1.5) + 200
    arrivals = gamma_arrivals(rate, shape, num_drawn, generator)
    while arrivals[-1] < seconds:
        arrivals = np.concatenate((arrivals, arrivals[-1] + gamma_arrivals(rate, shape, num_drawn, generator)))
    return arrivals[arrivals < seconds]
