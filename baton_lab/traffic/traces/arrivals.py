"""Random arrival times of requests. They do not depend on when earlier requests are answered. Does no I/O.

Used by `baton_lab.traffic.traces.generators` for simulated traffic, and by `baton bench` for real traffic.
"""

import numpy as np
from numpy.typing import NDArray


def poisson(rate: float, seconds: float, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the arrival times of a Poisson process with `rate` arrivals per second in [0, seconds), ascending."""
    return np.sort(generator.uniform(0.0, seconds, generator.poisson(rate * seconds)))


def gamma_arrivals(rate: float, shape: float, num: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the first `num` arrival times in seconds, ascending, of a process with gamma distributed gaps of mean 1 /
    rate.

    The squared coefficient of variation of the gaps is 1 / shape. With a shape of 1, the process is a Poisson process.
    With a smaller shape, requests arrive in bursts; with a larger shape, they arrive more evenly.
    """
    return np.cumsum(generator.gamma(shape, 1 / (shape * rate), num))


def gamma_arrivals_until(
    seconds: float, rate: float, shape: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return the arrival times in [0, seconds), ascending, with gamma distributed gaps of mean 1 / rate.
    `gamma_arrivals` explains `shape`."""
    num_drawn = int(rate * seconds * 1.5) + 200
    arrivals = gamma_arrivals(rate, shape, num_drawn, generator)
    while arrivals[-1] < seconds:
        arrivals = np.concatenate((arrivals, arrivals[-1] + gamma_arrivals(rate, shape, num_drawn, generator)))
    return arrivals[arrivals < seconds]
