"""Traces generated from a seed: steady, bursty, diurnal, bimodal and shifting traffic.

Arrivals are a Poisson process whose rate may change over time. Bursty traffic has gamma distributed gaps instead.
Prompt and output lengths are gamma distributed around their means. Equal arguments give the same trace on every
machine. Does no I/O.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.errors import InvalidArgumentError
from baton_lab.traffic.traces.arrivals import gamma_arrivals_until, poisson
from baton_lab.traffic.traces.trace import MAX_TOKENS, Trace

BURSTINESS = 8.0
"""Squared coefficient of variation of the gaps between the arrivals of bursty traffic. A Poisson process has 1."""
SWING = 0.6
"""Amplitude of the rate of diurnal traffic, as a fraction of the mean rate."""
_SPREAD = 0.5
"""Coefficient of variation (standard deviation divided by mean) of prompt and output lengths."""


@dataclass(frozen=True)
class Lengths:
    """Mean numbers of prompt and output tokens of one kind of request."""

    prompt: float
    output: float

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt), ("output", self.output)):
            if not 1 <= value <= MAX_TOKENS:
                raise InvalidArgumentError(f"lengths: {name} = {value:g} is out of range: use 1 to {MAX_TOKENS}")


PROMPT_HEAVY = Lengths(6000, 64)
OUTPUT_HEAVY = Lengths(200, 512)
MIXED = Lengths(1500, 200)


@dataclass(frozen=True)
class Phase:
    """Period of a trace with one request rate and one kind of requests."""

    seconds: float
    rate: float
    """Mean number of requests per second."""
    lengths: Lengths


def steady(rate: float, seconds: float, seed: int, lengths: Lengths = MIXED) -> Trace:
    """Return a trace with Poisson arrivals at a constant rate."""
    return shifting([Phase(seconds, rate, lengths)], seed, name="steady")


def bursty(rate: float, seconds: float, seed: int, lengths: Lengths = MIXED) -> Trace:
    """Return a trace with the same mean rate as `steady`, in which requests arrive in bursts. The gaps between arrivals
    have a squared coefficient of variation of `BURSTINESS`."""
    _check(rate, seconds)
    generator = np.random.default_rng(seed)
    arrivals = gamma_arrivals_until(seconds, rate, 1 / BURSTINESS, generator)
    return _trace("bursty", arrivals, lambda num: _draw(lengths, num, generator))


def diurnal(rate: float, seconds: float, seed: int, lengths: Lengths = MIXED) -> Trace:
    """Return a trace with Poisson arrivals whose rate varies like a day. The rate follows one period of a sine around
    the mean `rate`, from its minimum through its maximum to its minimum."""
    _check(rate, seconds)
    generator = np.random.default_rng(seed)
    most = rate * (1 + SWING)
    drawn = poisson(most, seconds, generator)
    wanted = rate * (1 - SWING * np.cos(2 * np.pi * drawn / seconds))
    kept = generator.uniform(size=len(drawn)) * most < wanted
    return _trace("diurnal", drawn[kept], lambda num: _draw(lengths, num, generator))


def bimodal(
    rate: float,
    seconds: float,
    seed: int,
    kinds: tuple[Lengths, Lengths] = (PROMPT_HEAVY, OUTPUT_HEAVY),
    share: float = 0.3,
) -> Trace:
    """Return a trace with Poisson arrivals of two kinds of requests. The fraction `share` of the requests is of the
    first kind, the others are of the second."""
    _check(rate, seconds)
    generator = np.random.default_rng(seed)

    def draw(num: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        is_first = generator.uniform(size=num) < share
        first, second = _draw(kinds[0], num, generator), _draw(kinds[1], num, generator)
        return np.where(is_first, first[0], second[0]), np.where(is_first, first[1], second[1])

    return _trace("bimodal", poisson(rate, seconds, generator), draw)


def shifting(phases: Sequence[Phase], seed: int, *, name: str = "shifting") -> Trace:
    """Return a trace with Poisson arrivals whose rate and lengths change from phase to phase."""
    generator = np.random.default_rng(seed)
    parts, begin_s = [], 0.0
    for phase in phases:
        _check(phase.rate, phase.seconds)
        arrivals = begin_s + poisson(phase.rate, phase.seconds, generator)
        parts.append((arrivals, *_draw(phase.lengths, len(arrivals), generator)))
        begin_s += phase.seconds
    arrivals, prompts, outputs = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Trace(name, arrivals, prompts, outputs)


def _trace(
    name: str, arrivals: NDArray[np.float64], draw: Callable[[int], tuple[NDArray[np.int64], NDArray[np.int64]]]
) -> Trace:
    return Trace(name, arrivals, *draw(len(arrivals)))


def _draw(lengths: Lengths, num: int, generator: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    shape = 1 / _SPREAD**2
    drawn = [generator.gamma(shape, mean / shape, num) for mean in (lengths.prompt, lengths.output)]
    prompt, output = (np.clip(np.rint(each), 1, MAX_TOKENS).astype(np.int64) for each in drawn)
    return prompt, output


def _check(rate: float, seconds: float) -> None:
    for name, value in (("rate", rate), ("seconds", seconds)):
        if not 0 < value < float("inf"):
            raise InvalidArgumentError(f"{name} = {value:g} is out of range: use a number above 0")
