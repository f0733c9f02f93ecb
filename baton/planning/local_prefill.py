"""Predicted time of a local prefill, in which no prefill chain is used: a generation group computes the prompt itself.
The prompt is computed in chunks, and each chunk is added to a decode step.

A step with prefill has a time limit (`stretch`, and the setting `generate.step_budget_s`). The time that decoding
does not need is used for the chunk. The predicted time of a prompt is its own compute time, plus one decode step for
each of its chunks if other sequences are running. docs/decisions/0014-conditional-disaggregation.md has the reasons for
the constants. All functions are pure.
"""

import math
from dataclasses import dataclass

from baton.errors import InvalidArgumentError

LEAST_STEP_TOKENS = 16
"""Minimum number of prefill tokens in each step. It guarantees that local prefills progress and that their speed can be
measured."""

_STRETCH = 1.5
"""Maximum duration of a decode step with prefill, as a multiple of the same step without prefill. It is used if chains
do most prefills: an engine rarely prefills, and streams are then hardly slower."""
_BUDGET_STRETCH = 3.0
"""The same multiple if `step_budget_s` is set. Engines that do all prefills need it if decoding alone takes more than a
third of the budget. With 1.5, a single stream would take two thirds of each step while prompts wait."""


def stretch(step_budget_s: float) -> float:
    """Return the maximum duration of a decode step with prefill, as a multiple of the same step without prefill. The
    step may always take `step_budget_s` seconds, even if that is longer."""
    return _BUDGET_STRETCH if step_budget_s else _STRETCH


@dataclass(frozen=True)
class LocalPrefill:
    """Configuration of local prefill, in which generation groups compute prompts themselves. Raises
    InvalidArgumentError for an invalid field."""

    speed: float
    """Compute speed of a generation group as a multiple of the speed of one prefill rank. 2 means twice as fast."""
    max_step_tokens: int
    """Maximum number of prefill tokens in one step."""
    step_budget_s: float = 0.0
    """Setting `generate.step_budget_s`: duration in seconds that a decode step with prefill may take, even if it is
    more than the multiple of the step's duration without prefill. Infinity: no limit by time."""

    def __post_init__(self) -> None:
        for name, least in (("speed", 0.0), ("max_step_tokens", 1), ("step_budget_s", 0.0)):
            value = getattr(self, name)
            if not value >= least or not self.speed > 0:
                raise InvalidArgumentError(f"{name} = {value} is out of range: use at least {least}, a speed above 0")

    def steps_s(self, prefill_s: float, num_tokens: int, step_s: float) -> float:
        """Return the time in seconds by which decode steps delay the local prefill of a prompt. The prompt has
        `num_tokens` tokens and takes `prefill_s` seconds alone.

        The delay is one decode step of `step_s` seconds for each chunk, and half a step before the first chunk. Pass 0
        for `step_s` if no sequences are running; the delay is then 0.
        """
        if step_s <= 0 or num_tokens < 1:
            return 0.0
        chunk_s = self.chunk_s(prefill_s, num_tokens, step_s)
        return (0.5 + (math.ceil(prefill_s / chunk_s) if chunk_s > 0 else 1)) * step_s

    def chunk_s(self, prefill_s: float, num_tokens: int, step_s: float) -> float:
        """Return the time in seconds that the largest permitted chunk of a prompt adds to a decode step. The prompt has
        `num_tokens` tokens and takes `prefill_s` seconds alone. The decode step takes `step_s` seconds without the
        chunk."""
        token_s = prefill_s / num_tokens
        allowed_s = max((stretch(self.step_budget_s) - 1) * step_s, self.step_budget_s - step_s)
        bound_s = max(allowed_s, LEAST_STEP_TOKENS * token_s)
        return min(bound_s, self.max_step_tokens * token_s)
