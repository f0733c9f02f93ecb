"""How long a generation group takes to prefill a prompt by itself, in chunks between its decode steps.

A step that decodes and prefills takes at most so many times as long as decoding alone: what is left of it is prefill.
So a prompt beside running rows takes its own computation and, for each chunk, a decode step; beside none, its
computation alone. Pure.
"""

import math
from dataclasses import dataclass

from baton.errors import InvalidArgumentError

LEAST_STEP_TOKENS = 16
"""Of prefill in a step, whatever the bound: so that prefills progress, and their speed stays known."""


@dataclass(frozen=True)
class LocalPrefill:
    """Generation groups as they are configured. Raises InvalidArgumentError on a bad field."""

    speed: float
    """Of their computing, over that of one prefill rank."""
    max_step_stretch: float
    """How many times as long as without prefill a step may take."""
    max_step_tokens: int
    """Of prefill in one step."""

    def __post_init__(self) -> None:
        for name, least in (("speed", 0.0), ("max_step_stretch", 1.0), ("max_step_tokens", 1)):
            value = getattr(self, name)
            if not value >= least or not self.speed > 0:
                raise InvalidArgumentError(f"{name} = {value} is out of range: use at least {least}, a speed above 0")

    def steps_s(self, prefill_s: float, num_tokens: int, step_s: float) -> float:
        """Seconds of decoding until a prompt of `num_tokens`, which takes `prefill_s` alone, is prefilled, and of half
        a step that runs when it comes; `step_s`: of a step that only decodes, 0 where no row does."""
        if step_s <= 0 or num_tokens < 1:
            return 0.0
        token_s = prefill_s / num_tokens
        bound_s = max((self.max_step_stretch - 1) * step_s, LEAST_STEP_TOKENS * token_s)
        chunk_s = min(bound_s, self.max_step_tokens * token_s)
        return (0.5 + (math.ceil(prefill_s / chunk_s) if chunk_s > 0 else 1)) * step_s
