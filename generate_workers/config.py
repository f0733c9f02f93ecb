"""Settings of a generation engine. The module imports neither torch nor grpc, because launchers also import it."""

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
"""Values of the setting `speculation` that make draft steps attend to keys selected among all keys of the sequence."""


@settings
class EngineConfig:
    """Limits and policies of a generation engine."""

    num_slots: Count = 16
    """Number of slots of each engine. Each sequence in the batch, one per choice of a request, uses one slot."""
    max_slot_tokens: Count = 8192
    """Maximum number of tokens of a sequence in a slot, prompt and output together."""
    max_batched_tokens: Count = 256
    """Maximum prompt tokens of a step. If step_budget_s is set: up to 4 times as many, while no output streams."""
    max_waiting: Count = 64
    """Maximum number of choices without a lease that wait for a slot, in addition to one per free slot."""
    step_budget_s: Annotated[float, Field(ge=0)] = 0.0
    """Longest decode step with prefill, in seconds, or 3 decode steps if longer; 0: 1.5 decode steps; inf: no limit."""
    residency: ResidencyName = "device"
    """KV policy: device or host (memory of all KV), infinigen (fewer keys), int4 (4 bits), infinigen_int4 (both)."""
    selection_file: AbsolutePath = ""
    """File that `baton prepare` wrote for policies that select keys; empty: the default path of this model's file."""
    pool_tokens: Annotated[int, Field(ge=0)] = 0
    """Maximum tokens whose KV a sequence keeps per layer, except in layers 0 and 1 (only infinigen); 0: no limit."""
    pool_eviction: EvictionName = "counter"
    """Token to evict if pool_tokens is reached: least often selected (counter), least recently (lru), oldest (fifo)."""
    kv_memory_bytes: Bytes = 0
    """KV memory of each engine, like "4GiB"; 0: what all slots need, at most a part of the free memory."""
    device_memory_bytes: Bytes = 0
    """Device memory for weights and KV, like "1GiB" (CPU: only counted). 0: 90 % of free GPU memory (CPU: no limit)."""
    speculation: SpeculationName = "auto"
    """Draft source: off, auto, ngram (known text), model (draft_model). Others: served model, with fewer keys."""
    draft_model: str = ""
    """Name, folder or GGUF file of the draft model (speculation = model). It needs the served model's tokenizer."""
    draft_tokens: Annotated[int, Field(ge=0, le=8)] = 0
    """Number of drafts per sequence and step; 0: chosen automatically from costs and acceptance rate."""
    acceptance: AcceptanceName = "coupled"
    """Rule for accepting drafts: coupled (the output depends only on the seed) or maximal (accepts more drafts)."""
    draft_keys: Annotated[int, Field(ge=2)] = 256
    """Keys of a draft step (snapkv: 1.5 times as many; GPU: whole pages). With draft_tokens=0 also half or double."""
    step_graphs: bool = True
    """Run steps as CUDA graphs, one launched ahead (device cuda with Triton); false: launch each kernel."""
    growth_tokens: Count = 256
    """Output tokens for which a new sequence reserves memory. A low value lets more sequences in, but preempts more."""
    watchdog_floor_s: Seconds = 10.0
    """Shortest time in seconds without progress after which a step counts as hung and the engine is replaced."""

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
