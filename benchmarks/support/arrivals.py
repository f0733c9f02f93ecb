"""Arrival times of a burst of prompts: two long prompts at once, and short prompts while the long ones are served.
Performs no I/O."""

import random
from dataclasses import dataclass

LONG_TOKENS = 6000
SHORT_TOKENS = 256
_NUM_LONG = 2
_NUM_SHORT = 10
_FIRST_S = 0.2
_LAST_S = 2.0


@dataclass(frozen=True, order=True)
class Arrival:
    """One prompt, and its arrival time in seconds from the start."""

    at_s: float
    num_tokens: int
    seed: int
    """Seed of the prompt's random tokens."""


def burst(seed: int, long_tokens: int = LONG_TOKENS, short_tokens: int = SHORT_TOKENS) -> tuple[Arrival, ...]:
    """Return the arrivals of two long prompts at 0 s, and of ten short ones at random times between 0.2 and 2 s,
    ordered by time. The same seed gives the same arrivals."""
    rng = random.Random(seed)
    first = seed * (_NUM_LONG + _NUM_SHORT)
    long = [Arrival(0.0, long_tokens, first + index) for index in range(_NUM_LONG)]
    times = sorted(rng.uniform(_FIRST_S, _LAST_S) for _ in range(_NUM_SHORT))
    return (*long, *(Arrival(at_s, short_tokens, first + _NUM_LONG + index) for index, at_s in enumerate(times)))
