"""Predicted time of a prefill by a generation group itself, in chunks between its decode steps.

A step that decodes and prefills may take at most `max_step_stretch` times as long as decoding alone, or `mixed_step_s`
if that is longer. The time beyond decoding is prefill. So a prompt takes its own computation and, with running
sequences, one decode step for each of its chunks. Pure.
"""

import math
from dataclasses import dataclass

from baton.errors import InvalidArgumentError

LEAST_STEP_TOKENS = 16
"""Prefill tokens that every step takes at least, so that prefills progress and their speed stays known."""


@dataclass(frozen=True)
class LocalPrefill:
    """Configuration of prefill by generation groups themselves. Raises InvalidArgumentError on a bad field."""

    speed: float
    """Speed of a group's computing, as a multiple of that of one prefill rank."""
    max_step_stretch: float
    """Longest duration of a step with prefill, as a multiple of the duration without."""
    max_step_tokens: int
    """Most prefill tokens in one step."""
    mixed_step_s: float = 0.0
    """Seconds that a step with prefill may take if `max_step_stretch` allows less."""

    def __post_init__(self) -> None:
        for name, least in (("speed", 0.0), ("max_step_stretch", 1.0), ("max_step_tokens", 1), ("mixed_step_s", 0.0)):
            value = getattr(self, name)
            if not value >= least or not self.speed > 0:
                raise InvalidArgumentError(f"{name} = {value} is out of range: use at least {least}, a speed above 0")

    def steps_s(self, prefill_s: float, num_tokens: int, step_s: float) -> float:
        """Return the seconds of decoding that delay a prompt of `num_tokens`, which takes `prefill_s` alone: one decode
        step of `step_s` for each of its chunks, and half a step before it. `step_s` is 0 without running sequences."""
        if step_s <= 0 or num_tokens < 1:
            return 0.0
        chunk_s = self.chunk_s(prefill_s, num_tokens, step_s)
        return (0.5 + (math.ceil(prefill_s / chunk_s) if chunk_s > 0 else 1)) * step_s

    def chunk_s(self, prefill_s: float, num_tokens: int, step_s: float) -> float:
        """Return the seconds that the largest chunk of such a prompt adds to a decode step of `step_s`."""
        token_s = prefill_s / num_tokens
        allowed_s = max((self.max_step_stretch - 1) * step_s, self.mixed_step_s - step_s)
        bound_s = max(allowed_s, LEAST_STEP_TOKENS * token_s)
        return min(bound_s, self.max_step_tokens * token_s)
