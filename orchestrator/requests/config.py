"""The orchestrator's settings: limits, timeouts and policies."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from baton.settings.base import Count, Seconds, settings
from baton.settings.tracing import TraceExport
from orchestrator.requests.tenants import Tenants

Disaggregation = Literal["auto", "always", "never"]
ScalingMode = Literal["off", "advise", "act"]


@settings
class PrefixRules:
    """Sharing of KV among prompts with a common prefix."""

    block_tokens: Count = 128
    """Number of tokens in a block, the unit in which prompts share KV; smaller blocks share more, and cost more."""
    prefix_isolation: bool = True
    """True: tenants share no cached KV. If shared, a fast answer reveals that another tenant sent the same prompt."""


@settings
class OrchestratorLimits(TraceExport):
    """Limits, waits and policies of an orchestrator."""

    max_queued_requests: Count = 256
    """Maximum number of waiting requests; above it, the one with the weakest claim is refused, with a retry time."""
    max_queued_tokens: Count = 262_144
    """Maximum number of prompt tokens that wait, over all requests."""
    max_running: Count = 1024
    """Maximum number of choices that run at once; never more than the generation groups have slots."""
    max_attempts: Count = 3
    """Maximum number of attempts at one request, including the first, before its error is reported."""
    lease_ttl_s: Seconds = 30.0
    """Seconds after the last push or renewal until a reserved slot is freed."""
    generation_wait_s: Seconds = 30.0
    """Seconds that a request waits for a generation group before it ends with UNAVAILABLE."""
    prefill_wait_s: Seconds = 10.0
    """Seconds that a request waits for a prefill group before its generation group prefills by itself."""
    avoid_s: Seconds = 2.0
    """Seconds that a request avoids a group on which it failed, unless the group has been repaired meanwhile."""
    report_wait_s: Seconds = 1.0
    """Seconds that a finished request waits for the timings of its prefill ranks."""
    poll_s: Seconds = 0.5
    """Seconds between two polls of the workers' status; at least 2 s while the workers are idle."""
    elastic: bool = True
    """Choose ranks and order so that all prompts together wait least; if false, all ranks, in order of arrival."""
    overtaking: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.15
    """Delay that shorter, later prompts may cause a prompt by overtaking it, as a fraction of its predicted time."""
    disaggregation: Disaggregation = "auto"
    """Workers that prefill: a chain (always), the generation group (never), or the faster by prediction (auto)."""
    control_tokens_in_text: bool = False
    """Interpret control tokens that are spelled out in a chat's texts, so that clients can write turns themselves."""


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} is relative: use absolute paths, or None to take models from anywhere")
    return path


@settings
class AutoscalingConfig:
    """Autoscaling of the number of groups: latency targets, a budget of groups, and the pace of changes."""

    mode: ScalingMode = "off"
    """Mode of the autoscaler: disabled (off), only report what it would change (advise), or change groups (act)."""
    ttft_p95_s: Seconds = 2.0
    """Target for the 95th percentile of the time to first token, in seconds."""
    itl_p95_s: Seconds = 0.05
    """Target for the 95th percentile of the time between tokens, in seconds."""
    min: Annotated[int, Field(ge=0)] = 2
    """Minimum number of groups, both roles together; 0: all may leave while there is no traffic."""
    max: Count = 8
    """Maximum number of groups, both roles together; at least 2, one of each role."""
    cooldown_s: Seconds = 60.0
    """Seconds for which a smaller allocation must have been enough before groups leave."""
    interval_s: Seconds = 1.0
    """Seconds between two decisions."""
    cold_start_s: Seconds = 30.0
    """Assumed seconds that the start of a group takes, until a start has been measured."""
    flip_s: Seconds = 2.0
    """Assumed seconds that an idle group takes to change its role, until a change has been measured."""

    @model_validator(mode="after")
    def _budget_holds_both_roles(self) -> Self:
        if self.max < 2:
            raise ValueError(f"max = {self.max} is out of range: use at least 2, a group of each role")
        if self.min > self.max or self.min == 1:
            raise ValueError(f"min = {self.min} is out of range: use 0, or 2 to max = {self.max}")
        return self


@settings
class OrchestratorConfig(OrchestratorLimits, PrefixRules):
    """All settings of one orchestrator, except the model and its place."""

    tenants: Tenants = Tenants()
    """The tenants that share the queue: their keys, weights and bounds."""
    model_folders: tuple[Annotated[Path, AfterValidator(_absolute)], ...] | None = None
    """Folders below which a model that an operator names for a group must be; None: it may be anywhere."""
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    """Targets and bounds by which groups start, leave and change their role."""
