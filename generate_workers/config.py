"""Settings of a generation engine. Imports neither torch nor grpc, because launchers read them as well."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from baton.settings.base import AbsolutePath, Bytes, Count, Seconds, settings
from generate_workers.residency.traits import POLICIES, POOLED


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"{name!r} is unknown: use one of {', '.join(POLICIES)}")
    return name


ResidencyName = Annotated[str, AfterValidator(_known_policy)]
"""Name of a residency policy, which decides where KV is stored and which keys are attended to."""
EvictionName = Literal["counter", "lru", "fifo"]
"""Names of the policies that evict tokens from a pool of KV."""
AcceptanceName = Literal["coupled", "maximal"]
SpeculationName = Literal["off", "auto", "streaming", "snapkv", "infinigen", "ngram", "model"]
CHOOSING_DRAFTS: tuple[SpeculationName, ...] = ("snapkv", "infinigen")
"""Speculations whose drafts select among all keys of a sequence."""


@settings
class EngineConfig:
    """Limits and policies of a generation engine."""

    num_slots: Count = 16
    """Number of slots of each engine: sequences in its batch, one for each choice of a request."""
    max_slot_tokens: Count = 8192
    """Most tokens that one slot may hold, prompt and output together."""
    max_prefill_tokens_per_step: Count = 256
    """Most prompt tokens that an engine prefills in a step; up to 4 times this number of a burst with burst_step_s."""
    max_waiting: Count = 64
    """Choices that may wait for a slot to prefill locally, not counting those for which a slot is free."""
    max_step_stretch: Annotated[float, Field(ge=1)] = 1.5
    """Longest decode step that also prefills, as a multiple of the step's time without prefill; inf: no bound."""
    mixed_step_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds that a decode step which also prefills may take, if that is longer than max_step_stretch allows."""
    burst_step_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds by which steps that also prefill may be longer now and then, to end all waiting prefills; 0: none."""
    residency: ResidencyName = "device"
    """Where KV is stored: device or host memory. The other policies approximate: fewer keys, 4 bits, or both."""
    selection_file: AbsolutePath = ""
    """File of `baton prepare`, for residency or drafts that select keys by it; empty: where it wrote for this model."""
    pool_tokens: Annotated[int, Field(ge=0)] = 0
    """Most tokens whose KV a sequence keeps in each layer except the first two, with residency infinigen; 0: all."""
    pool_eviction: EvictionName = "counter"
    """Token evicted at pool_tokens: selected least often (counter), longest ago (lru), or oldest (fifo)."""
    kv_memory_bytes: Bytes = 0
    """KV memory of each engine, like "4GiB"; 0: enough for all slots, at most half the free memory / num_groups."""
    device_memory_bytes: Bytes = 0
    """Limit of weights and KV, like "1GiB", as on a device with that memory; only counted. 0: only kv_memory_bytes."""
    speculation: SpeculationName = "auto"
    """Source of drafts: auto, off, the text (ngram), draft_model (model), or the model over few keys (others)."""
    draft_model: str = ""
    """Name, folder or GGUF file of the draft model, used if speculation is model. Its tokenizer must be the same."""
    draft_tokens: Annotated[int, Field(ge=0, le=8)] = 0
    """Number of tokens drafted per sequence and step; 0: planned from costs and acceptance."""
    acceptance: AcceptanceName = "coupled"
    """Rule by which drafts are accepted: coupled (a text depends only on its seed) or maximal (accepts more drafts)."""
    draft_keys: Annotated[int, Field(ge=2)] = 256
    """Keys that a draft attends to; half or twice that number if it is planned. With snapkv up to half more."""
    step_graphs: bool = True
    """Replay decode steps from CUDA graphs on device cuda with Triton; false: launch each kernel, to compare."""
    growth_tokens: Count = 256
    """Output tokens for which a new sequence gets memory; fewer fit more sequences, and preempt more often."""
    watchdog_floor_s: Seconds = 10.0
    """Shortest time without work, in seconds, after which a step counts as stalled and the engine is replaced."""

    @model_validator(mode="after")
    def _a_pool_evicts(self) -> Self:
        if self.pool_tokens and not POLICIES[self.residency].has_pool:
            raise ValueError(
                f"pool_tokens = {self.pool_tokens} means nothing to residency {self.residency}: use 0, or {POOLED}"
            )
        return self

    @model_validator(mode="after")
    def _a_draft_model_drafts(self) -> Self:
        if self.speculation == "model" and not self.draft_model:
            raise ValueError(
                "draft_model is empty: name a smaller model with the same tokenizer, or use speculation off"
            )
        if self.draft_model and self.speculation != "model":
            raise ValueError(
                f"draft_model = {self.draft_model!r} means nothing to speculation {self.speculation}: use speculation"
                " model, or leave it empty"
            )
        return self
