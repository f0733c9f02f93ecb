"""The plan of a cluster: its complete configuration and the model that it serves.

`deploy.machine.arrangement` makes it for a machine, `deploy.machine.doctor` checks it, and `baton serve` and `baton
local` run it. Pure, except that the model's files are read when they are needed.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from deploy.config.cluster import ClusterConfig
from deploy.machine.resolved_model import ResolvedModel

WORKER_BYTES = 2**29
"""Bytes of memory that a worker uses in addition to weights and KV: an upper estimate for torch and the process
itself."""


@dataclass(frozen=True)
class ClusterPlan:
    """A cluster that can be started."""

    config: ClusterConfig
    """Complete configuration, in which `generate.draft_model` is a folder if it is set."""
    model: ResolvedModel
    why: str = ""
    """One line of text that explains why these pools were chosen; empty if the pools were not chosen for the
    machine."""

    @cached_property
    def draft(self) -> ResolvedModel | None:
        """The draft model; None if none is configured."""
        folder = self.config.generate.draft_model
        return ResolvedModel(Path(folder)) if folder else None

    @property
    def max_tokens(self) -> int:
        """Number of tokens, prompt and output, that a request may have. Raises ModelError."""
        return self.model.max_tokens(self.config.generate.max_slot_tokens)

    def worker_bytes(self) -> dict[str, int]:
        """Return the bytes of memory that a worker of each role needs, by role, so that Ray can find a node for it.
        They are the sum of the process itself, all weights, and KV. A prefill rank holds the KV of one prompt of the
        greatest length. A generation engine holds `generate.kv_memory_bytes` of KV. If that is 0 (the engine then
        chooses by its node's memory), the KV of one slot is counted, the least that it holds. Raises ModelError, and
        ConfigError for a bad file."""
        dtype, shape = self.config.model.dtype, self.model.shape(self.config.model.dtype)
        slot = shape.num_layers * shape.kv_bytes * self.max_tokens
        weights = WORKER_BYTES + self.model.weight_bytes(dtype)
        drafts = 0 if self.draft is None else self.draft.weight_bytes(dtype)
        return {
            "prefill": weights + slot,
            "generate": weights + drafts + (self.config.generate.kv_memory_bytes or slot),
        }
