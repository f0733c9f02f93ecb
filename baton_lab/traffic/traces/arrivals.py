"""Arrival processes: instants of requests that arrive regardless of earlier answers. Pure.

Used by `baton_lab.traffic.traces.generators` for traffic on paper, and by `baton bench` for traffic that is sent.
"""

import numpy as np
from numpy.typing import NDArray


def poisson(rate: float, seconds: float, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the arrivals of a Poisson process of that rate in [0, seconds), ascending."""
    return np.sort(generator.uniform(0.0, seconds, generator.poisson(rate * seconds)))


def gamma_arrivals(rate: float, shape: float, num: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the first `num` arrivals of a process whose gaps are gamma distributed around 1 / rate, ascending.

    The squared coefficient of variation of the gaps is 1 / shape: a shape of 1 is a Poisson process, with a smaller one
    requests come in bursts, with a larger one more evenly.
    """
    return np.cumsum(generator.gamma(shape, 1 / (shape * rate), num))


def gamma_arrivals_until(
    seconds: float, rate: float, shape: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return the arrivals in [0, seconds) of the process that `gamma_arrivals` describes."""
    num_drawn = int(rate * seconds * 1.5) + 200
    arrivals = gamma_arrivals(rate, shape, num_drawn, generator)
    while arrivals[-1] < seconds:
        arrivals = np.concatenate((arrivals, arrivals[-1] + gamma_arrivals(rate, shape, num_drawn, generator)))
    return arrivals[arrivals < seconds]
