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
    """Settings for sharing KV among prompts with a common prefix."""

    block_tokens: Count = 128
    """Number of tokens per KV block. Prompts share KV in whole blocks. Smaller blocks share more but cost more."""
    prefix_isolation: bool = True
    """True: tenants share no cached KV, so response times do not reveal what other tenants have sent."""


@settings
class OrchestratorLimits(TraceExport):
    """Limits, timeouts and policies of an orchestrator."""

    max_queued_requests: Count = 256
    """Maximum number of waiting requests. If it is exceeded, the request that would be served last is refused."""
    max_queued_tokens: Count = 262_144
    """Maximum total number of prompt tokens of all waiting requests."""
    max_running: Count = 1024
    """Maximum number of choices that run at the same time; also limited by the slots of all generation groups."""
    max_attempts: Count = 3
    """Maximum number of attempts at one request, including the first. If all fail, the last error is reported."""
    lease_ttl_s: Seconds = 30.0
    """Lifetime of a slot lease in seconds. It restarts with each push of KV and with each renewal."""
    generation_wait_s: Seconds = 30.0
    """Maximum seconds that a request waits for a generation group. Then it fails with UNAVAILABLE."""
    prefill_wait_s: Seconds = 10.0
    """Maximum seconds that a request waits for a prefill group. Then its generation group prefills by itself."""
    avoid_s: Seconds = 2.0
    """Maximum seconds that a retry waits before it may use a group on which the request has failed."""
    report_wait_s: Seconds = 1.0
    """Maximum seconds that a finished request waits for the timings of its prefill ranks."""
    poll_s: Seconds = 0.5
    """Seconds between two polls of the workers' status. While the workers are idle, it is at least 2 s."""
    elastic: bool = True
    """True: select a prompt's ranks and queue position by cost. False: use all ranks, and queue by arrival."""
    overtaking: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.15
    """Maximum delay of a prompt by later prompts, as a fraction of its predicted time to first token."""
    disaggregation: Disaggregation = "auto"
    """Workers that prefill: a chain (always), the generation group (never), or the faster by prediction (auto)."""
    control_tokens_in_text: bool = False
    """True: control tokens that are spelled out in chat messages are interpreted. False: they are ordinary text."""


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} is relative: use absolute paths, or None to take models from anywhere")
    return path


@settings
class AutoscalingConfig:
    """Settings of the autoscaler: latency targets, minimum and maximum number of groups, and the pace of changes."""

    mode: ScalingMode = "off"
    """Mode of the autoscaler: disabled (off), only report what it would change (advise), or change groups (act)."""
    ttft_p95_s: Seconds = 2.0
    """Target for the 95th percentile of the time to first token, in seconds."""
    itl_p95_s: Seconds = 0.05
    """Target for the 95th percentile of the time between tokens, in seconds."""
    min: Annotated[int, Field(ge=0)] = 2
    """Minimum number of groups of both roles together; 0: all groups may stop while there is no traffic."""
    max: Count = 8
    """Maximum number of groups of both roles together; at least 2, one of each role."""
    cooldown_s: Seconds = 60.0
    """Minimum seconds for which fewer groups must suffice before the autoscaler stops a group."""
    interval_s: Seconds = 1.0
    """Seconds between two decisions of the autoscaler."""
    cold_start_s: Seconds = 30.0
    """Assumed seconds that a group needs to start, until a start has been measured."""
    flip_s: Seconds = 2.0
    """Assumed seconds that an idle group needs to change its role, until a change has been measured."""

    @model_validator(mode="after")
    def _budget_holds_both_roles(self) -> Self:
        if self.max < 2:
            raise ValueError(f"max = {self.max} is out of range: use at least 2, a group of each role")
        if self.min > self.max or self.min == 1:
            raise ValueError(f"min = {self.min} is out of range: use 0, or 2 to max = {self.max}")
        return self


@settings
class OrchestratorConfig(OrchestratorLimits, PrefixRules):
    """All settings of one orchestrator, except those of the model and of its process."""

    tenants: Tenants = Tenants()
    """Tenants that share the queue, with their keys, weights and limits."""
    model_folders: tuple[Annotated[Path, AfterValidator(_absolute)], ...] | None = None
    """Folders that must contain any model an operator selects for a group; None: any folder is allowed."""
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    """Targets and limits of the autoscaler, which starts and stops groups and changes their roles."""
