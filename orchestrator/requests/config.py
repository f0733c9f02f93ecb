"""The orchestrator's settings: what it accepts, how long it waits, and how it chooses."""

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
    """How prompts that begin alike share KV."""

    block_tokens: Count = 128
    """Tokens of a block, the unit in which prompts share KV; smaller blocks share more, and cost more."""
    prefix_isolation: bool = True
    """True: tenants share no cached KV. If shared, a fast answer reveals that another tenant sent the same prompt."""


@settings
class OrchestratorLimits(TraceExport):
    """Limits, waits and policies of an orchestrator."""

    max_queued_requests: Count = 256
    """Requests that may wait; beyond, the one with the weakest claim is refused, with a time after which to retry."""
    max_queued_tokens: Count = 262_144
    """Prompt tokens that may wait, over all requests."""
    max_running: Count = 1024
    """Choices that may run at once; the generation groups' slots, where these are fewer."""
    max_attempts: Count = 3
    """Attempts at one request, the first included, before its error is reported."""
    lease_ttl_s: Seconds = 30.0
    """Seconds after the last push or renewal until a reserved slot is freed."""
    generation_wait_s: Seconds = 30.0
    """Seconds that a request waits for a generation group before it ends with UNAVAILABLE."""
    prefill_wait_s: Seconds = 10.0
    """Seconds that a request waits for a prefill group before its generation group prefills by itself."""
    avoid_s: Seconds = 2.0
    """Seconds that a request avoids a group that failed it, unless the group has begun a new life."""
    report_wait_s: Seconds = 1.0
    """Seconds that a finished request waits for the timings of its prefill ranks."""
    poll_s: Seconds = 0.5
    """Seconds between two polls of what the workers hold; while they hold nothing, of 2 s at least."""
    elastic: bool = True
    """Whether a prompt gets the ranks and turn that cost all prompts least; else all ranks, in order of arrival."""
    overtaking: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.15
    """Delay that shorter, later prompts may cause a prompt by overtaking it, as a fraction of its predicted time."""
    disaggregation: Disaggregation = "auto"
    """What prefills: a chain (always), the generation group (never), or the one predicted to be sooner (auto)."""
    control_tokens_in_text: bool = False
    """True: control tokens spelled out in a chat's texts act as such, so that clients can write turns themselves."""


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} is relative: use absolute paths, or None to take models from anywhere")
    return path


@settings
class AutoscalingConfig:
    """How many groups there are: latencies to hold, a budget of groups, and how fast they may come and go."""

    mode: ScalingMode = "off"
    """What the autoscaler does: nothing (off), only say what it would do (advise), or change the groups (act)."""
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
    cold_start_s: Seconds = 30.0
    """Seconds that the start of a group is taken to last until one has been seen."""
    flip_s: Seconds = 2.0
    """Seconds that an idle group is taken to need for the other role until one has been seen."""

    @model_validator(mode="after")
    def _budget_holds_both_roles(self) -> Self:
        if self.max < 2:
            raise ValueError(f"max = {self.max} is out of range: use at least 2, a group of each role")
        if self.min > self.max or self.min == 1:
            raise ValueError(f"min = {self.min} is out of range: use 0, or 2 to max = {self.max}")
        return self


@settings
class OrchestratorConfig(OrchestratorLimits, PrefixRules):
    """All that one orchestrator goes by, besides the model and its place."""

    tenants: Tenants = Tenants()
    """The tenants that share the queue: their keys, weights and bounds."""
    model_folders: tuple[Annotated[Path, AfterValidator(_absolute)], ...] | None = None
    """Folders below which a model must lie that an operator names for a group; None: it may lie anywhere."""
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    """Targets and bounds by which groups start, leave and change their role."""
