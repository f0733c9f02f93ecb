"""The plan of a cluster: its complete configuration and the model that it serves.

`deploy.machine.arrangement` makes the plan for a machine. `deploy.machine.doctor` checks the plan. `baton serve` and
`baton local` start the cluster from the plan. The module has no side effects, except that it reads the model's files
when they are needed.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from deploy.config.cluster import ClusterConfig
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import GpuState

CUDA_WORKER_BYTES = 2**31
"""Upper estimate of the host memory in bytes that a worker on a GPU uses, for torch, the libraries of CUDA, and copies
between host and device. The weights are copied to the GPU tensor by tensor."""
WORKER_BYTES = 2**29
"""Upper estimate of the memory in bytes that a worker uses in addition to weights and KV, for torch and the process
itself."""


@dataclass(frozen=True)
class ClusterPlan:
    """Plan of a cluster: a complete configuration from which the cluster can be started."""

    config: ClusterConfig
    """Complete configuration. If `generate.draft_model` is set, it is the path of a folder, not a model's name."""
    model: ResolvedModel
    why: str = ""
    """One line of text that explains why this number and size of workers was chosen for this machine. Empty if the user
    configured the workers."""
    gpus: tuple[GpuState, ...] = ()
    """GPUs of this machine that workers with the device cuda use. All have the same name."""
    gpu_note: str = ""
    """One line of text about GPUs of this machine that are not used: the reasons and the remedies. Empty if all GPUs
    are used, if none exists, or if the user has chosen another device."""

    @cached_property
    def draft(self) -> ResolvedModel | None:
        """The draft model; None if none is configured."""
        folder = self.config.generate.draft_model
        return ResolvedModel(Path(folder)) if folder else None

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a request, prompt and output together. Raises ModelError for a model that is not
        supported."""
        return self.model.max_tokens(self.config.generate.max_slot_tokens)

    def worker_bytes(self) -> dict[str, int]:
        """Return the bytes of memory that a worker needs, by role. Ray uses the number to find a node for the worker.

        The number is the sum of the process itself, all weights, and KV. A prefill rank holds the KV of one prompt of
        the greatest length. A generation engine holds `generate.kv_memory_bytes` of KV. If `generate.kv_memory_bytes`
        is 0, the engine chooses the amount of KV when it starts on its node, and the sum contains the KV of one slot,
        which is the minimum. Raises ModelError for a model that is not supported, and ConfigError for a damaged weight
        file.
        """
        config, dtype = self.config, self.config.model.dtype
        slot = self.model.token_bytes(dtype) * self.max_tokens
        on_rank, on_engine = self.weights_on(config.prefill.device), self.weights_on(config.generate.device)
        drafts = 0 if self.draft is None else self.draft.weight_bytes(dtype, on_engine)
        kv_bytes = config.generate.kv_memory_bytes or slot
        return {
            "prefill": WORKER_BYTES + self.model.weight_bytes(dtype, on_rank) + slot,
            "generate": WORKER_BYTES + self.model.weight_bytes(dtype, on_engine) + drafts + kv_bytes,
        }

    def weights_on(self, device: str) -> str:
        """Return the form of weights on a device, one of WEIGHT_FORMS. GPUs do not keep quantised weights as they are
        stored."""
        return "bfloat16" if device == "cuda" else self.config.model.weights
