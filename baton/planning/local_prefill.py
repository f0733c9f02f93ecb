"""Predicted time of a local prefill: a generation group computes a prompt by itself, in chunks that are part of its
decode steps.

A step that decodes and prefills may take at most `max_step_stretch` times as long as decoding alone, or `mixed_step_s`
if that is longer. The additional time is used for prefill. So the time of a prompt is its own computation and, if
sequences are running, one decode step for each of its chunks. Pure.
"""

import math
from dataclasses import dataclass

from baton.errors import InvalidArgumentError

LEAST_STEP_TOKENS = 16
"""Minimum number of prefill tokens in every step, so that prefills progress and their speed can be measured."""


@dataclass(frozen=True)
class LocalPrefill:
    """Configuration of local prefill. Raises InvalidArgumentError for an invalid field."""

    speed: float
    """Computing speed of a generation group, as a multiple of the speed of one prefill rank."""
    max_step_stretch: float
    """Maximum duration of a step with prefill, as a multiple of its duration without prefill."""
    max_step_tokens: int
    """Maximum number of prefill tokens in one step."""
    mixed_step_s: float = 0.0
    """Seconds that a step with prefill may take if `max_step_stretch` allows less."""

    def __post_init__(self) -> None:
        for name, least in (("speed", 0.0), ("max_step_stretch", 1.0), ("max_step_tokens", 1), ("mixed_step_s", 0.0)):
            value = getattr(self, name)
            if not value >= least or not self.speed > 0:
                raise InvalidArgumentError(f"{name} = {value} is out of range: use at least {least}, a speed above 0")

    def steps_s(self, prefill_s: float, num_tokens: int, step_s: float) -> float:
        """Return the seconds by which decoding delays a prompt of `num_tokens`, which takes `prefill_s` alone: one
        decode step of `step_s` for each of its chunks, and half a step before the first. `step_s` is 0 without running
        sequences."""
        if step_s <= 0 or num_tokens < 1:
            return 0.0
        chunk_s = self.chunk_s(prefill_s, num_tokens, step_s)
        return (0.5 + (math.ceil(prefill_s / chunk_s) if chunk_s > 0 else 1)) * step_s

    def chunk_s(self, prefill_s: float, num_tokens: int, step_s: float) -> float:
        """Return the seconds that the largest chunk of a prompt adds to a decode step of `step_s`. The prompt has
        `num_tokens` tokens and takes `prefill_s` alone."""
        token_s = prefill_s / num_tokens
        allowed_s = max((self.max_step_stretch - 1) * step_s, self.mixed_step_s - step_s)
        bound_s = max(allowed_s, LEAST_STEP_TOKENS * token_s)
        return min(bound_s, self.max_step_tokens * token_s)
