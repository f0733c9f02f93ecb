"""The orchestrator's configuration: what it accepts and how long it waits. Validated once, where it is made."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from baton.errors import ConfigError
from orchestrator.requests.tenants import Tenants

Disaggregation = Literal["auto", "always", "never"]
DISAGGREGATION: tuple[Disaggregation, ...] = get_args(Disaggregation)


@dataclass(frozen=True)
class OrchestratorConfig:
    """Limits, waits and policies of one orchestrator. Raises ConfigError on a bad field."""

    max_queued: int = 256
    """Largest number of requests that may wait for a slot; beyond it, those with the least claim are refused."""
    max_queued_tokens: int = 262_144
    """Largest number of prompt tokens that may wait, over all waiting requests."""
    max_running: int = 1024
    """Largest number of choices that may run at once; the generation groups' slots, where these are fewer."""
    tenants: Tenants = field(default_factory=Tenants)
    """The tenants that share the queue: their keys, weights and bounds."""
    max_attempts: int = 3
    """Attempts at one request, the first included, before its error is reported."""
    lease_ttl_s: float = 30.0
    """Seconds for which a slot is kept without a sign of life from its prefill; renewed while the chain runs."""
    generation_wait_s: float = 30.0
    """Seconds that a request waits for a generation group before it ends with UNAVAILABLE."""
    prefill_wait_s: float = 10.0
    """Seconds that a request waits for a prefill group before its generation group prefills by itself."""
    avoid_s: float = 2.0
    """Seconds that a request waits for another group, or a new life of the same group, before it returns to a group
    that failed it."""
    report_wait_s: float = 1.0
    """Seconds that a finished request waits for the timings of its prefill ranks."""
    poll_s: float = 0.5
    """Seconds between two polls of what the workers hold."""
    elastic: bool = True
    """Whether each prompt gets the number of a group's ranks, and the turn, that cost all prompts least; if not, every
    prompt gets all ranks, first come first served."""
    overtaking: float = 0.15
    """Extra time that a prompt may take because shorter prompts that came later are served first, as a part of the time
    that was predicted when it came. A larger value favours short prompts, a smaller one long prompts."""
    disaggregation: Disaggregation = "auto"
    """Which workers prefill, where both kinds could. auto: a prefill group's chain, or the generation group by itself
    between its decode steps, whichever is predicted to be faster; always: a chain; never: the generation group."""
    block_tokens: int = 128
    """Tokens of a block, the unit in which prompts that begin alike share KV: with smaller blocks prompts share more
    tokens, at a higher cost."""
    prefix_isolation: bool = False
    """Whether prompts share KV only with prompts of the same tenant. If not, the time that a prompt takes can tell one
    tenant that another tenant has sent it too."""

    model_folders: tuple[Path, ...] | None = None
    """Folders below which a model must lie that an operator names for a group; None: it may lie anywhere."""

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if isinstance(value, bool | Tenants):
                continue
            if name == "model_folders":
                holds = value is None or (isinstance(value, tuple) and all(each.is_absolute() for each in value))
                self._require(holds, name, "use absolute paths, or None to take models from anywhere")
            elif name == "disaggregation":
                self._require(value in DISAGGREGATION, name, f"use one of {', '.join(DISAGGREGATION)}")
            elif name == "overtaking":
                self._require(0 <= value < math.inf, name, "use 0 to let nobody overtake, or more")
            elif name.endswith("_s"):
                self._require(0 < value < math.inf, name, "use a time above 0 seconds")
            else:
                self._require(value >= 1, name, "use at least 1")

    def _require(self, holds: bool, name: str, remedy: str) -> None:
        if not holds:
            raise ConfigError(f"orchestrator.{name} = {getattr(self, name)!r} is out of range: {remedy}")
