"""The plan of a cluster: its complete configuration and the model that it serves.

`deploy.machine.arrangement` makes the plan for a machine. `deploy.machine.doctor` checks the plan. `baton serve` and
`baton local` start the cluster from the plan. The module has no side effects, except that it reads the model's files
when they are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from baton.process.topology import node_of
from deploy.config.cluster import ClusterConfig
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import GpuState, Machine

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
        """Return the bytes of memory that a worker needs, by role. A Ray that already runs uses the number to find a
        node for the worker.

        The number is the sum of the process itself, all weights, and KV. Workers on the CPUs of a node share the
        weights, but each counts all of them: before a worker is placed, it is not known which other workers its node
        will have. A prefill rank holds the KV of one prompt of the greatest length. A generation engine holds
        `generate.kv_memory_bytes` of KV. If `generate.kv_memory_bytes` is 0, the engine chooses the amount of KV when
        it starts on its node, and the sum contains the KV of one slot, which is the minimum. Raises ModelError for a
        model that is not supported, and ConfigError for a damaged weight file.
        """
        config, dtype = self.config, self.config.model.dtype
        slot = self.model.token_bytes(dtype) * self.max_tokens
        on_rank = self.weights_on(config.prefill.device)
        kv_bytes = config.generate.kv_memory_bytes or slot
        return {
            "prefill": WORKER_BYTES + self.model.weight_bytes(dtype, on_rank) + slot,
            "generate": WORKER_BYTES + self.copy_bytes(config.generate.device) + kv_bytes,
        }

    def copy_bytes(self, device: str) -> int:
        """Return the bytes of one copy of the weights of the model, and of the draft model if there is one, in the form
        that workers on `device` use. Raises ConfigError for a damaged weight file."""
        models = [self.model] if self.draft is None else [self.model, self.draft]
        return sum(model.weight_bytes(self.config.model.dtype, self.weights_on(device)) for model in models)

    def host_weight_bytes(self, machine: Machine) -> int:
        """Return the bytes of the weights that all workers together have in the memory of `machine`. Raises ConfigError
        for a damaged weight file.

        Workers with the device cpu share copies (`baton.modeling.checkpoints.shared_weights`): those that are bound to
        CPUs of the same NUMA node have one copy, and all others together have one. A worker with the device emulated
        has a copy of its own, and a worker on a GPU has none. If the disk has no room for the files of shared weights,
        each worker has a copy of its own, which this number does not count.
        """
        config, dtype = self.config, self.config.model.dtype
        prefill, generate = config.prefill, config.generate
        on_ranks = _copies(prefill.device, prefill.cores, prefill.num_groups * prefill.num_ranks, machine)
        on_engines = _copies(generate.device, generate.cores, generate.num_groups, machine)
        model_bytes = self.model.weight_bytes(dtype, config.model.weights)
        draft_bytes = self.copy_bytes("cpu") - model_bytes
        is_shared = "emulated" not in (prefill.device, generate.device)
        num_copies = len(on_ranks | on_engines) if is_shared else len(on_ranks) + len(on_engines)
        return num_copies * model_bytes + len(on_engines) * draft_bytes

    def weights_on(self, device: str) -> str:
        """Return the form of weights on a device, one of WEIGHT_FORMS. GPUs do not keep quantised weights as they are
        stored."""
        return "bfloat16" if device == "cuda" else self.config.model.weights


def _copies(device: str, cores: Sequence[Sequence[int]], num_workers: int, machine: Machine) -> frozenset[int | None]:
    """Return a set that has one element for each copy of the weights that the workers of a pool have in host memory:
    the number of the NUMA node, or None for workers that are not bound to a node."""
    if device == "cuda":
        return frozenset()
    if device == "emulated":
        return frozenset(range(num_workers))
    bound = [cpus or machine.cpus for cpus in cores] or [machine.cpus][:num_workers]
    return frozenset(node_of(cpus, machine.nodes) for cpus in bound)
