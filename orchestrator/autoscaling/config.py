"""The autoscaler's settings: latencies to hold, a budget of groups, and how often it may change its mind."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from baton.settings.base import Count, Seconds, settings


@settings
class AutoscalingConfig:
    """Targets and bounds of the autoscaler."""

    ttft_p95_s: Seconds = 2.0
    """Seconds to the first token that 95 of 100 requests are to stay below."""
    itl_p95_s: Seconds = 0.05
    """Seconds between tokens that 95 of 100 requests are to stay below."""
    min: Annotated[int, Field(ge=0)] = 2
    """Groups of both roles together, at least; 0: all may leave while there is no traffic."""
    max: Count = 8
    """Groups of both roles together, at most; one of each role at least."""
    cooldown_s: Seconds = 60.0
    """Seconds for which a smaller allocation must have been enough before groups leave."""
    interval_s: Seconds = 1.0
    """Seconds between two decisions."""
    advisory: bool = False
    """Whether decisions are only reported, and not carried out."""

    @model_validator(mode="after")
    def _budget_holds_both_roles(self) -> Self:
        if self.max < 2:
            raise ValueError(f"max = {self.max} is out of range: use at least 2, a group of each role")
        if self.min > self.max or self.min == 1:
            raise ValueError(f"min = {self.min} is out of range: use 0, or 2 to max = {self.max}")
        return self
